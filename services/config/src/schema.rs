//! All settings of all services.
//!
//! One configuration file may serve a whole cluster: a service uses its own sections and checks the
//! others. The transfer lease (2 s) is a protocol constant and not a setting, because both nodes
//! must agree.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use crate::{
    section::section,
    types::{
        Auto, ByteSize, CpuList, Device, Disaggregate, Dtype, EtcdPrefix, Isa, KvDtype, LoadFormat,
        LogFormat, ModelPath, NodePolicy, NodeUrl, Origin, Pair, Password, ReasoningFormatName,
        Roles, Secret, ServerUrl, SpecialTokensInContent, Speculate, TierAdmission, ToolFormatName,
        Transport, WeightPlace,
    },
};

const fn loopback(port: u16) -> SocketAddr {
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), port)
}

/// Maximum of `model.adapter_slots`, also of a derived number.
pub(crate) const ADAPTER_SLOTS_MAX: u32 = 64;

const fn secs(count: u64) -> Duration {
    Duration::from_secs(count)
}

section! {
    /// The served model and how its weights are loaded. Router and nodes need equal values, except
    /// for `chat_template`, which only the router reads.
    pub struct Model = "model" {
        /// Path of the model: a GGUF file, a folder with one GGUF file, a folder with config.json,
        /// tokenizer.json and safetensors, or a model of the Hugging Face hub as
        /// hf:ORG/NAME[@REVISION] or hf:ORG/NAME[@REVISION]/FILE.gguf. A service downloads hub
        /// files that the cache lacks; HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE have their
        /// usual meaning.
        path: Option<ModelPath> = None,
            "Required: the router loads tokenizer and chat template, nodes load the weights.";
        /// Name of the model in client requests.
        name: Option<String> = None,
            "Unset means the name of the file or folder without .gguf, and ORG/NAME for a model of the hub.";
        /// Number format of weights and activations. fp8 keeps the matrices of layers in FP8 (e4m3)
        /// with a scale for each row, on GPUs from Hopper on; a CPU computes it in bf16.
        dtype: Dtype = Dtype::Bf16,
            "bf16 needs half the memory and bandwidth of f32; q8 (CPUs) and fp8 (GPUs) halve the weights again with larger rounding errors; f32 is for exact comparisons.";
        /// Number format of KV. auto is f32 with dtype = f32 and bf16 otherwise. fp8 (e4m3 with a
        /// scale for each token and head) holds nearly twice the tokens of bf16 in the same memory,
        /// and halves the KV that a transfer sends and attention reads. Prefill and decode nodes
        /// need equal values.
        kv_dtype: KvDtype = KvDtype::Auto,
            "bf16 is the format of the models' training; fp8 has larger rounding errors.";
        /// Source of the weights: auto loads the files at model.path, dummy generates seeded random
        /// weights from config.json alone.
        load_format: LoadFormat = LoadFormat::Auto,
            "dummy measures speed without a download of the weights; the router still needs tokenizer.json.";
        /// File with a Jinja chat template that replaces the model's own template. Only the router
        /// reads it.
        chat_template: Option<PathBuf> = None,
            "Unset means the model's own template; some of these do not support tools.";
        /// Format of tool calls in the model's output; auto infers the format from the chat
        /// template.
        tool_format: ToolFormatName = ToolFormatName::AUTO,
            "A chat template shows the model the format, so the router can infer it.";
        /// Format in which a model writes reasoning; auto infers the format from the chat
        /// template, none leaves reasoning in the content.
        reasoning_format: ReasoningFormatName = ReasoningFormatName::AUTO,
            "A chat template has the tags around reasoning in earlier answers, so the router can infer them.";
        /// Treatment of special tokens, such as <|im_end|>, that a client spells in chat messages,
        /// tools or template arguments: text keeps them text, parse makes them special tokens.
        /// Prompts of /v1/completions always parse them. Only the router reads the setting, for all
        /// models.
        special_tokens_in_content: SpecialTokensInContent = SpecialTokensInContent::Text,
            "With parse a client can end its own message and write a system message.";
        /// LoRA adapters that a node loads at start, each as NAME=FOLDER. The folder has PEFT's
        /// adapter_config.json and adapter_model.safetensors. Clients name the adapter as
        /// MODEL:NAME.
        adapters: Vec<Pair> = Vec::new(),
            "The weights of an adapter are read when the node starts.";
        /// Maximum number of LoRA adapters of a node.
        adapter_slots: Auto<u32> = Auto::Derived,
            "As many as model.adapters, on CPUs at least 8. On GPUs each slot takes memory from the \
             start: 0.34 GB for a rank of 64 and a model of 8B parameters.",
            0..=ADAPTER_SLOTS_MAX;
        /// Maximum rank of a LoRA adapter.
        adapter_rank_max: u32 = 64,
            "Most adapters have a rank of 8 to 64; time and memory grow with the rank.",
            1..=512;
    }
}

section! {
    /// The router: its addresses, admission limits and time-outs.
    pub struct Router = "router" {
        /// Address of the OpenAI HTTP API, /health, /ready, /live and /metrics.
        http: SocketAddr = loopback(8000),
            "Port 8000 is usual for OpenAI-compatible servers; the loopback address keeps the API private until the operator opens it.";
        /// Address of the gRPC API (baton.v1.Inference), gRPC health and reflection.
        grpc: SocketAddr = loopback(8001),
            "The port after the HTTP port.";
        /// Address of /metrics, /live and /ready. For one release, router.http serves /metrics too.
        metrics: SocketAddr = loopback(0),
            "Port 0 takes a free port and logs it, so services on one machine do not conflict.";
        /// Address of the operator's API: list, drain and trace nodes, reset prefix caches, update
        /// weights, explain requests. Without router.admin_keys it has no authentication and must
        /// be a loopback address. On another address it speaks only TLS if router.tls_cert is set.
        admin: SocketAddr = loopback(8002),
            "The port after the gRPC port; only users of the machine reach the loopback address.";
        /// PEM file with the certificate chain of the router, its own certificate first. Then
        /// router.http and router.grpc speak only TLS. The router reads changed files again within
        /// about 2 s.
        tls_cert: Option<PathBuf> = None,
            "The loopback address needs no encryption.";
        /// PEM file with the private key of router.tls_cert.
        tls_key: Option<PathBuf> = None,
            "Required with router.tls_cert.";
        /// TOML file with the API keys of clients. Each [[key]] has name and sha256, as baton keys
        /// new prints them, and optionally models, priority, weight, requests_per_minute,
        /// tokens_per_minute, streams_max, cache_group and gateway. The router reads a changed file
        /// again within about 2 s.
        keys: Option<PathBuf> = None,
            "Without keys every client that reaches the router may use it.";
        /// TOML file with the API keys of operators for router.admin; each [[key]] has name and
        /// sha256.
        admin_keys: Option<PathBuf> = None,
            "The loopback address needs no keys.";
        /// Models besides the model of section [model], each as NAME=PATH. NAME is model.name of
        /// the model's nodes; PATH is as in model.path, for tokenizer and chat template.
        models: Vec<Pair> = Vec::new(),
            "Most clusters serve one model.";
        /// Chat templates of the models in router.models, each as NAME=PATH; PATH is as in
        /// model.chat_template.
        chat_templates: Vec<Pair> = Vec::new(),
            "Empty means each model's own template.";
        /// Tool call formats of the models in router.models, each as NAME=FORMAT; FORMAT is as in
        /// model.tool_format.
        tool_formats: Vec<Pair> = Vec::new(),
            "Empty means that the router infers each format from the chat template.";
        /// Formats of reasoning of the models in router.models, each as NAME=FORMAT; FORMAT is as
        /// in model.reasoning_format.
        reasoning_formats: Vec<Pair> = Vec::new(),
            "Empty means that the router infers each format from the chat template.";
        /// Additional model names, each as ALIAS=NAME.
        aliases: Vec<Pair> = Vec::new(),
            "Aliases serve clients with a built-in model name.";
        /// Origins of the web pages that may read responses of router.http in a browser (CORS), such as
        /// https://chat.example.com; * allows all.
        cors_origins: Vec<Origin> = Vec::new(),
            "Empty means all origins where clients need API keys, and otherwise pages of the router's machine: the pages of a visitor's browser could use a router without keys.";
        /// Node that prefills a prompt. auto: a prefill node or the decode node, whichever costs
        /// clients less time by prediction. always: a prefill node, if one is eligible. never: the
        /// decode node.
        disaggregate: Disaggregate = Disaggregate::Auto,
            "A fixed split leaves an idle decode node unused while prompts queue at the prefill node.";
        /// Meaning of the nodes' roles. fixed: prefill nodes prefill, decode nodes decode. fluid: the
        /// roles are preferences, and each node prefills and decodes what predictions give it.
        roles: Roles = Roles::Fixed,
            "Roles became fluid in this release; they stay fixed until measurements on GPUs favour the change.";
        /// Choice among the nodes of a role: predicted takes the nodes with the lowest predicted
        /// waiting time of clients, cache-aware the least work in uncached prompt tokens,
        /// least-load the fewest requests, round-robin each node in turn.
        policy: NodePolicy = NodePolicy::Predicted,
            "Predictions use measured step and transfer times; without measurements they fall back to cache-aware.";
        /// Maximum size of a request body; the router answers a larger body with 413.
        body_bytes_max: ByteSize = ByteSize::mib(4),
            "A prompt of 128 Ki tokens takes about 1 MiB as text or as JSON ids; 4 MiB leaves room.",
            ByteSize::kib(1)..=ByteSize::gib(1);
        /// Maximum number of in-flight requests, including waiting requests; the router answers
        /// further requests with 503, or with 429 if the caller already runs its share.
        requests_max: u32 = 1024,
            "A request takes at most a few hundred KiB, so the router stays below a few hundred MiB.",
            1..=1_000_000;
        /// Maximum number of requests that wait for a node, over all models; the router answers
        /// further requests with 503, or with 429 if the caller already runs its share.
        waiting_max: u32 = 512,
            "Half of router.requests_max: a longer queue delays requests more than a retry would.",
            0..=1_000_000;
        /// Maximum time that a request waits for a node with free capacity; then the router
        /// answers 503. A request that would wait longer, by prediction, gets this answer at once,
        /// if requests have waited without a break for an eighth of this time. An answer that has
        /// begun waits until its deadline.
        waiting_timeout: Duration = secs(30),
            "Most clients give up after a minute; half of a minute leaves time for the answer.",
            secs(0)..=secs(3600);
        /// Maximum number of consecutive attempts of one request that emit no token. Attempts fail
        /// when a node or a transfer fails.
        attempts_max: u32 = 8,
            "The limit ends a request that crashes nodes. When nodes were killed every 2.6 s, 4 attempts did not always suffice for long prompts.",
            1..=16;
        /// Deadline of a whole request. A client may set another deadline: by the deadline of its
        /// gRPC call, or by the HTTP header x-baton-deadline-ms.
        timeout: Duration = secs(600),
            "4,096 tokens at 10 tokens/s take seven minutes.",
            secs(1)..=secs(86_400);
        /// Maximum time without progress on an attempt; then the router starts the next attempt.
        /// While a request waits or is prefilled, a change in the node's reported load counts as
        /// progress. While it decodes, only a token does.
        idle_timeout: Duration = secs(60),
            "It must exceed the slowest step; raise it where one chunk of a prompt takes a minute.",
            secs(1)..=secs(86_400);
        /// Maximum deadline of a client: the router rejects a larger x-baton-deadline-ms (over gRPC
        /// timeout_ms), and shortens a later deadline of a gRPC call.
        timeout_max: Duration = secs(3600),
            "An hour suffices for the longest sequences on the slowest machines.",
            secs(1)..=secs(86_400);
        /// Maximum time that a client may leave a full stream unread; then the router ends the
        /// stream.
        slow_client_timeout: Duration = secs(30),
            "A phone that changes networks recovers within 30 s. An unread stream holds no slot and no KV.",
            secs(1)..=secs(3600);
        /// Maximum number of events that the router buffers for a slow client. If the client does
        /// not read half of a full buffer within half a second, the request leaves its node. It
        /// continues when the client has read half of the buffer.
        slow_client_events: u32 = 256,
            "About 3 s of a fast answer; more would be generated for clients that never read.",
            1..=65_536;
        /// Maximum bytes of the responses that the router stores for /v1/responses; 0 stores none.
        /// When the store is full, the API key or tenant with the most bytes loses its oldest
        /// response.
        responses_bytes_max: ByteSize = ByteSize::mib(256),
            "About 2,000 turns of conversations of 32 Ki tokens; each stored turn has its whole input.",
            ByteSize::mib(0)..=ByteSize::gib(64);
        /// Maximum age of a stored response.
        responses_age_max: Duration = secs(86_400),
            "An agent that waits for a person overnight continues its conversation.",
            secs(1)..=secs(30 * 86_400);
        /// Maximum time for which a stream that begins with the header x-baton-resume goes on
        /// without a connection; 0 makes no stream resumable.
        resume_window: Duration = secs(30),
            "A phone that changes networks, and a proxy that restarts, are back within 30 s.",
            secs(0)..=secs(600);
        /// Maximum bytes of events that the router keeps for all resumable streams. A further
        /// stream is not resumable.
        resume_bytes_max: ByteSize = ByteSize::mib(64),
            "256 streams with 256 KiB each, the most that one stream keeps.",
            ByteSize::kib(64)..=ByteSize::gib(16);
        /// Time after SIGTERM for which the router stays ready and accepts requests, so that its
        /// successor can take over. Then the router is unready and accepts requests for as long
        /// again, because load balancers need time to stop sending them. SIGINT skips both times.
        drain_delay: Duration = secs(5),
            "Kubernetes takes the router out of a Service within about two seconds; ingresses need a little longer.",
            secs(0)..=secs(600);
        /// Maximum time until in-flight requests finish, once the router accepts no more; then the
        /// router cancels them.
        drain_timeout: Option<Duration> = None,
            "Unset means timeout_max, within which every request ends, so no answer is cut. The router exits as soon as its last request has ended.",
            secs(0)..=secs(86_400);
        /// Maximum age of a client's connection, 10 % more or less at random. Then the router asks
        /// the client to open another one: by GOAWAY over HTTP/2, by Connection: close in the next
        /// response over HTTP/1.1. Requests in progress finish.
        connection_age_max: Duration = secs(300),
            "Clients that keep their connections find an added router within this time; a connection every five minutes costs nothing.",
            secs(10)..=secs(86_400);
    }
}

section! {
    /// A prefill or decode node: its addresses, batch limits, memory and device.
    pub struct Node = "node" {
        /// Name of the node: letters, digits, '.', '_' and '-', at most 64 characters.
        id: Option<String> = None,
            "Unset means role and port, such as decode-50061. In Kubernetes use the name of the pod.";
        /// Address of the node's gRPC server, to which routers connect.
        grpc: SocketAddr = loopback(50_061),
            "Nodes on one machine need different ports.";
        /// Address of /metrics, /live and /ready.
        metrics: SocketAddr = loopback(0),
            "Port 0 takes a free port and logs it, so nodes on one machine do not conflict.";
        /// Memory of the KV cache.
        kv_memory: Option<ByteSize> = None,
            "Unset means 1GiB on a CPU (20,000 tokens of a 135M model in f32) and the rest of gpu_memory_percent on a GPU. On a CPU set it to the memory that the machine has left.",
            ByteSize::mib(1)..=ByteSize::gib(16_384);
        /// Number of KV blocks (16 tokens of a KV group each); overrides kv_memory.
        blocks: Option<u32> = None,
            "Tests and benchmarks need an exact count.",
            2..=16_777_216;
        /// Maximum number of sequences in one step (rows of the running batch).
        slots: Auto<u32> = Auto::Derived,
            "64 on a CPU, where decode throughput grows little beyond 64 rows; on a GPU up to 256, as many as the KV memory holds with 1,024 tokens each.",
            1..=4096;
        /// Maximum number of tokens in one step, over all sequences, prefill and decode together.
        step_tokens: Auto<u32> = Auto::Derived,
            "512 on a CPU; on a GPU at most 8192 tokens, 512MiB of KV and a quarter of the free memory. A decode node on a GPU takes the smallest step whose measured prefill throughput is within 2 % of the best, because larger steps only delay first tokens.",
            1..=65_536;
        /// Maximum number of prompt tokens of one sequence in one step (chunked prefill).
        chunk_tokens: Auto<u32> = Auto::Derived,
            "256 on a CPU, so that two prompts share a step; on a GPU step_tokens, because smaller chunks make long prompts slower.",
            1..=65_536;
        /// Maximum time of a step that decodes. A node that decodes adds only as many prompt tokens
        /// to such a step as fit into this time, by step times measured at start and while serving.
        /// Prefill nodes ignore it.
        itl_max: Auto<Duration> = Auto::Derived,
            "On a GPU 20ms or 4 decode steps, whichever is longer: decode rows keep 50 tokens/s, and prefill in the same steps keeps most of its throughput. No limit on a CPU, where chunk_tokens bounds the step.",
            Duration::from_millis(1)..=secs(60);
        /// Enables the prefix cache: KV of finished sequences stays in free blocks and serves later
        /// prompts with the same beginning.
        prefix_cache: bool = true,
            "The cache uses only blocks that are free anyway; false is for measurements without it.";
        /// Maximum number of steps in flight: launched, with the result not yet read.
        depth: u32 = 2,
            "The next step is planned while one step runs; more steps only delay stop conditions.",
            1..=8;
        /// Speculative decoding: off, or ngram, which takes draft tokens from an earlier occurrence
        /// of the last tokens in the sequence. The output does not change.
        speculate: Speculate = Speculate::Off,
            "ngram is up to five times faster where answers repeat their prompt, and gains nothing elsewhere.";
        /// Maximum number of draft tokens of one sequence in one step.
        speculate_tokens: u32 = 8,
            "Measured on a CPU with repetitive answers: further draft tokens cost as much as they save.",
            1..=64;
        /// Number of tokens in a step up to which draft tokens are added.
        speculate_step_tokens: u32 = 64,
            "On a CPU smaller steps are limited by memory bandwidth, larger steps by arithmetic.",
            2..=4096;
        /// Minimum number of tokens that must repeat before draft tokens are proposed.
        speculate_ngram_min: u32 = 3,
            "Two tokens repeat by chance in any prose; three seldom do.",
            1..=64;
        /// Maximum number of tokens compared to select the best of several repetitions.
        speculate_ngram_max: u32 = 8,
            "About half a sentence or a line of code; a longer match predicts little better.",
            1..=64;
        /// Device of the forward pass: cpu, cuda (an NVIDIA GPU), or auto, which selects a usable
        /// GPU and otherwise the CPU. GPUs do not support q8: with it, auto selects the CPU.
        device: Device = Device::Auto,
            "auto uses a GPU where there is one; cuda is an error where no GPU is usable, and baton doctor gives the reason.";
        /// UUID of the GPU as baton doctor and nvidia-smi -L show it, or a unique prefix; with
        /// tensor parallelism one for each rank, separated by commas.
        gpu: Option<String> = None,
            "Unset means the first visible GPU, or the first node.tp visible GPUs.";
        /// Tensor parallelism: number of ranks. Each rank is a process on a GPU of its own (2, 4 or
        /// 8 of one host) or on CPUs, with an equal share of the heads.
        tp: u32 = 1,
            "One rank is fastest unless its device is too small or too slow; tp must divide the model's number of KV heads.",
            1..=16;
        /// Expert parallelism on CPUs: with true, each rank of node.tp has whole experts, and with
        /// false a part of every expert; auto takes whole experts only where node.tp does not
        /// divide the width of an expert.
        expert_parallel: Auto<bool> = Auto::Derived,
            "Equal parts of every expert keep all ranks equally busy; whole experts do not, but fit widths that node.tp does not divide.";
        /// Number of nodes in the container of this node. Each may use an equal part of the
        /// container's memory limit. On a CPU the node does not start if weights and KV together
        /// exceed this part. A node serves without the host tier if tier.host_memory exceeds this
        /// part.
        nodes_per_container: u32 = 1,
            "A container has one node as a rule; `baton up` sets the number of its nodes.",
            1..=1_024;
        /// Percentage of the GPU's memory for weights, activations and KV together; used when
        /// neither kv_memory nor blocks is set.
        gpu_memory_percent: u32 = 90,
            "Other processes on a GPU seldom need more than a tenth; two nodes on one GPU take 45 each.",
            1..=100;
        /// Part of the memory of gpu_memory_percent that stays free for CUDA graphs and for kernels
        /// that are loaded at their first launch.
        gpu_reserve: ByteSize = ByteSize::gib(1),
            "More than the largest use measured so far; the log shows the use at start.",
            ByteSize::mib(1)..=ByteSize::gib(1_024);
        /// Maximum time at start to find the fastest cuBLASLt algorithms for the model's GEMMs; 0s
        /// disables tuning. Results are kept for later starts, and a later start continues an
        /// unfinished search.
        gpu_tune: Duration = secs(2),
            "Enough for an 8B model on an H200, once.",
            secs(0)..=secs(600);
        /// Folder of the tuning results, by GPU, driver and cuBLASLt version.
        gpu_tune_dir: Option<PathBuf> = None,
            "Unset means baton in XDG_CACHE_HOME, otherwise .cache/baton in HOME, otherwise no folder: every start tunes again.";
        /// Lets the engine thread poll instead of sleep while a step runs on the GPU. A sleeping
        /// core loses its caches, which doubles the host time between steps.
        gpu_poll: bool = true,
            "A GPU costs more than a core; set false where nodes share few cores.";
        /// Path of the library of Baton's GPU kernels, built by `make kernels`.
        kernels: Option<PathBuf> = None,
            "Unset means libbaton_kernels.so in the program's folder.";
        /// Number of compute threads.
        threads: Option<u32> = None,
            "Unset means one thread per CPU of node.cpus or node.numa_node, otherwise one per CPU that the process may use.",
            1..=1024;
        /// CPUs of the compute threads, one thread per CPU in this order, in Linux notation. Other
        /// threads are not pinned.
        cpus: Option<CpuList> = None,
            "Unset means that Linux places the threads, which works well with one node per machine.";
        /// NUMA node whose CPUs the compute threads use, instead of node.cpus. These threads touch
        /// weights and KV first, so the memory is local to this NUMA node.
        numa_node: Option<u32> = None,
            "Unset means no pinning. On a machine with several sockets run one baton node per NUMA node.",
            0..=1023;
        /// Instruction set of the CPU kernels: auto selects the fastest that the machine supports;
        /// an unsupported one is an error.
        isa: Isa = Isa::Auto,
            "Other values are for comparisons: f32 results are bit-equal from avx2 up.";
        /// Maximum number of sequences that wait for a slot; the node rejects further ones with
        /// Busy, and the router tries another node.
        waiting_max: Auto<u32> = Auto::Derived,
            "Four full batches (4 x slots); a longer queue belongs in the router.",
            0..=65_536;
        /// Maximum length of a sequence, prompt and answer, in tokens.
        sequence_tokens_max: Option<u32> = None,
            "Unset means the model's context length, at most the tokens that the KV blocks hold.",
            16..=16_777_216;
        /// Time in flight of a step after which /live fails, so that Kubernetes restarts the
        /// container.
        hang_restart: Duration = secs(300),
            "Routers stop using a stalled node after a minute; a restart loads the weights again, so it is only for longer hangs.",
            secs(1)..=secs(86_400);
        /// Maximum time after SIGTERM until in-flight sequences finish; then the node aborts them.
        drain_timeout: Duration = secs(25),
            "The node needs up to 10 s more to stop: with 25 s the chart sets a grace period of 35 s.",
            secs(0)..=secs(3600);
    }
}

section! {
    /// KV tiers of a node: KV that leaves the prefix cache stays in host memory or on a disk, and
    /// later prompts load it again.
    pub struct Tier = "tier" {
        /// Pinned host memory for the KV of a node on GPUs; 0B means no such tier. The node pins it
        /// in the background after the start.
        host_memory: ByteSize = ByteSize::mib(0),
            "Other programs of the host cannot use pinned memory, so the operator decides.";
        /// File of the disk tier, which the node creates and preallocates. Each node needs a file
        /// of its own, on a local disk whose file system supports direct I/O. The file serves later
        /// starts.
        disk_path: Option<PathBuf> = None,
            "Unset means no disk tier: a node does not know which disk is local and fast.";
        /// Size of the file in tier.disk_path.
        disk_size: ByteSize = ByteSize::gib(64),
            "KV of half a million tokens of an 8B model, which a disk of 3 GB/s writes in 20 s.",
            ByteSize::mib(1)..=ByteSize::gib(65_536);
        /// Blocks that are saved: second_touch saves blocks that occur in a second request, and
        /// blocks of a prompt that begins with a hit; always saves every full block.
        admission: TierAdmission = TierAdmission::SecondTouch,
            "With second_touch a prompt that never returns costs no copies, but a conversation computes its first turn twice.";
        /// Gives later turns of a conversation the queue position of its first turn for five
        /// minutes, and keeps the KV of a finished turn until the next turn is due. Without tiers
        /// it has no effect.
        sessions: bool = true,
            "When the KV of all conversations does not fit, finishing the oldest first moves less KV than advancing all.";
    }
}

section! {
    /// KV transfer between nodes.
    pub struct Transfer = "transfer" {
        /// Address on which this node receives control messages from its peers (ZeroMQ).
        control was "notice": SocketAddr = loopback(0),
            "Port 0 takes a free port, which peers learn from the router. Set a port behind a firewall.";
        /// Transport of KV: tcp; ipc (copy engines) between GPUs of one host; nccl (kernels on both
        /// GPUs); or auto, the first that works of ipc (within a host), nccl (within a host, and
        /// between hosts with RDMA adapters) and tcp.
        transport: Transport = Transport::Auto,
            "auto rejects nccl if a probe transfer moves less than 10 GB/s. Between hosts without RDMA adapters, or with \
             cluster.tls_cert, KV goes by nccl only if both nodes are set to it: NCCL does not encrypt. KV goes by tcp to a \
             node that does not support the set transport; the log and metrics report this.";
        /// Maximum number of CTAs, each on an SM of its own, that NCCL uses on each GPU for one
        /// pair of nodes.
        nccl_max_ctas was "nccl_blocks": u32 = 4,
            "A CTA moves 30 GB/s on an H200; the smaller value of two nodes applies. With transport nccl, decode \
             steps of few sequences leave up to 4 SMs free without becoming slower; with 8 or 16 CTAs concurrent \
             steps take up to 40 % longer.",
            1..=64;
        /// Maximum number of TCP connections by which this node sends KV to another node. It opens
        /// the first for the pair, and each further one while more chunks are queued than
        /// connections are busy. With TLS it opens up to twice as many, at most 16.
        tcp_connections: u32 = 8,
            "One connection moves what one core copies and hashes, so several fill a link of 100 Gbit/s.",
            1..=16;
        /// Enables hashing of KV at both ends of a transfer between GPUs. The tcp transport always
        /// hashes KV.
        verify: bool = false,
            "Each GPU reads the KV once more, which takes 0.08 ms for 256 MiB on an H200 and delays each chunk by as much.";
        /// Address on which this node receives KV over TCP, or with ipc and nccl the control data
        /// of each chunk.
        data: SocketAddr = loopback(0),
            "Port 0 takes a free port, which peers learn from the router.";
        /// Host name or IP address under which peers reach transfer.control and transfer.data;
        /// required when these listen on all addresses. With etcd it is also the host of a
        /// node.grpc that listens on all addresses.
        advertise: Option<String> = None,
            "Unset means the IP address of transfer.control.";
        /// Maximum number of KV bytes in one chunk. Pairs that agree on tcp use at most 8MiB.
        chunk_bytes: Auto<ByteSize> = Auto::Derived,
            "4MiB on a CPU (2 ms at 2 GB/s) and 32MiB on a GPU (0.1 ms): large enough for full bandwidth, small enough to overlap with computation.",
            ByteSize::kib(4)..=ByteSize::mib(256);
    }
}

section! {
    /// Live weight updates.
    pub struct Weights = "weights" {
        /// Memory of new weights during an update: shadow reserves GPU memory for a second copy of
        /// the weights at start, in_place overwrites the weights in use and serves nothing
        /// meanwhile, and with auto a GPU rejects updates. On CPUs auto and shadow take host memory
        /// during the update.
        place: WeightPlace = WeightPlace::Auto,
            "Few clusters update their weights, and the memory of a second copy holds many KV blocks.";
        /// Buffers for chunks of weights that a trainer broadcasts by NCCL. With place shadow or
        /// in_place, a node on one GPU reserves them at start. A node with node.tp above 1 reserves
        /// none.
        buffers: u32 = 2,
            "One buffer receives a chunk while the chunk in the other one is copied to its place.",
            1..=16;
        /// Largest chunk of a broadcast.
        chunk_bytes: ByteSize = ByteSize::mib(256),
            "Large enough for full bandwidth, and small compared with the weights.",
            ByteSize::mib(1)..=ByteSize::gib(4);
    }
}

section! {
    /// Membership: a static list of nodes, DNS names, or registration in etcd; secret and
    /// certificates of the cluster.
    pub struct Cluster = "cluster" {
        /// gRPC addresses of the prefill nodes. The router looks dns:host:port up every second, and
        /// each address of the host is a node.
        prefill: Vec<NodeUrl> = Vec::new(),
            "Without prefill nodes decode nodes prefill the prompts.";
        /// gRPC addresses of the decode nodes, as in cluster.prefill.
        decode: Vec<NodeUrl> = Vec::new(),
            "The router is ready when at least one decode node is ready.";
        /// Endpoints of an etcd cluster. Nodes register in etcd and routers watch it, so nodes can
        /// join and leave a running cluster; cluster.prefill and cluster.decode must be empty.
        etcd: Vec<ServerUrl> = Vec::new(),
            "A static list needs no etcd.";
        /// Prefix of the cluster's keys in etcd; clusters that share an etcd need different
        /// prefixes.
        etcd_prefix: EtcdPrefix = EtcdPrefix::default(),
            "Use for example /baton/staging for a second cluster.";
        /// User name in etcd. Nodes need read and write permission on the prefix; routers need read
        /// permission.
        etcd_user: Option<String> = None,
            "etcd checks users only after its operator enables authentication.";
        /// Password of the etcd user. Prefer the environment: every user of the machine can see
        /// flags.
        etcd_password: Option<Password> = None,
            "Required with etcd_user.";
        /// PEM file with the certificates of the CAs that sign etcd's certificate.
        etcd_ca: Option<PathBuf> = None,
            "Required with https endpoints: no CA is trusted by default.";
        /// PEM file with the client certificate for etcd.
        etcd_cert: Option<PathBuf> = None,
            "Required when etcd demands client certificates; needs etcd_key.";
        /// PEM file with the private key of etcd_cert.
        etcd_key: Option<PathBuf> = None,
            "Required with etcd_cert.";
        /// Lease of a node's record in etcd, in whole seconds: etcd deletes the record when the
        /// node has not renewed the lease for this time.
        etcd_ttl: Duration = secs(10),
            "Routers detect a lost node within 2.5 s themselves; the lease only removes its record.",
            secs(2)..=secs(3600);
        /// Secret of the cluster, equal for all services. It authenticates the calls of routers to
        /// nodes, and nodes to each other. Prefer secret_file or the environment: every user of the
        /// machine can see flags.
        secret was "transfer.secret": Option<Secret> = None,
            "Required: a default secret would be known to everybody. Generate one: openssl rand -hex 32.";
        /// File that contains the secret. A service warns at its start if every user of the machine
        /// can use the file.
        secret_file was "transfer.secret_file": Option<PathBuf> = None,
            "Kubernetes and Docker mount secrets as files; set either secret or secret_file.";
        /// PEM file with the certificate chain of this service, its own certificate first. Then the
        /// services of the cluster speak TLS: routers and nodes over gRPC, and nodes when they
        /// exchange KV by tcp. Both sides of a connection need a certificate, so set it for all
        /// services. A service reads changed files again within about 2 s.
        tls_cert: Option<PathBuf> = None,
            "Services of one machine or of a private network need no encryption.";
        /// PEM file with the private key of tls_cert.
        tls_key: Option<PathBuf> = None,
            "Required with tls_cert.";
        /// PEM file with the certificates of the CAs that sign the certificates of all services.
        tls_ca: Option<PathBuf> = None,
            "Required with tls_cert: no CA is trusted by default.";
        /// DNS name in the certificate of every service of the cluster. It need not resolve to an
        /// address.
        tls_name: String = "baton".into(),
            "Nodes change their addresses; the name distinguishes the cluster from other owners of certificates of the same CA.";
    }
}

impl Router {
    /// Returns the maximum time until in-flight requests finish in a shutdown.
    pub fn drain_max(&self) -> Duration {
        self.drain_timeout.unwrap_or(self.timeout_max)
    }
}

section! {
    /// Logs, traces and metrics.
    pub struct Telemetry = "telemetry" {
        /// Log level (error, warn, info, debug or trace), or levels by module such as
        /// info,router=debug.
        log: String = "info".into(),
            "info logs one line for each start, stop, failure and change of health, and none per token. Release \
             builds contain no trace level.";
        /// Log format: pretty is readable text, json is for log collectors, auto is pretty on a
        /// terminal and json otherwise.
        log_format: LogFormat = LogFormat::Auto,
            "auto suits a terminal and a container.";
        /// Address of an OpenTelemetry collector for traces and metrics (OTLP over gRPC).
        otlp: Option<ServerUrl> = None,
            "Unset means OTEL_EXPORTER_OTLP_ENDPOINT, and without it no export; a collector usually listens on port 4317.";
        /// Instance name of this process in traces and metrics.
        instance: Option<String> = None,
            "Unset means service.instance.id of OTEL_RESOURCE_ATTRIBUTES, and without it the node's id, or router and \
             its port.";
    }
}
