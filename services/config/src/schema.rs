//! Every setting of every service: this file is the reference.
//!
//! One file may serve a whole cluster: each service reads the sections it uses and checks the rest.
//! The transfer lease (2 s) is a constant of the protocol, not a setting: both ends must agree.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use crate::{
    section::section,
    types::{
        ByteSize, CpuList, Device, Dtype, EtcdPrefix, EtcdUrl, GrpcUrl, Isa, LoadFormat, LogFormat,
        ModelPath, Pair, Password, Secret, Speculate, ToolFormat, Transport,
    },
};

const fn loopback(port: u16) -> SocketAddr {
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), port)
}

const fn secs(count: u64) -> Duration {
    Duration::from_secs(count)
}

section! {
    /// Which model is served and how its weights are read. The same on router and nodes.
    pub struct Model = "model" {
        /// A GGUF file, a folder with one GGUF file, a folder with config.json, tokenizer.json and
        /// safetensors, or a model of the hub: hf:ORG/NAME[@REVISION], or
        /// hf:ORG/NAME[@REVISION]/FILE.gguf for one file of it. What is not in
        /// the cache yet is fetched; HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE count.
        path: Option<ModelPath> = None,
            "Every service needs it: the router for tokenizer and chat template, nodes for weights.";
        /// The name under which clients ask for the model.
        name: Option<String> = None,
            "Unset means the name of the file or folder, without .gguf; ORG/NAME for a model of the hub.";
        /// The number format of weights, activations and KV; with q8, KV is bf16.
        dtype: Dtype = Dtype::Bf16,
            "Half the memory and traffic of f32, which is for exact comparisons; q8 halves the weights again and rounds more.";
        /// auto reads the weights at the path; dummy makes seeded random ones from a config.json alone.
        load_format: LoadFormat = LoadFormat::Auto,
            "dummy is for measuring speed without the weights; the router still needs a tokenizer.json.";
        /// A file with a chat template, as Jinja, in place of the model's own. Only the router reads it.
        chat_template: Option<PathBuf> = None,
            "Models bring the one they were trained with; some lack the part that shows tools.";
        /// How the model writes calls of tools: hermes is JSON between tool_call tags, llama3 JSON
        /// alone or behind the python tag, auto what the chat template asks for.
        tool_format: ToolFormat = ToolFormat::Auto,
            "Templates show the model what to write, so it can be read off them.";
    }
}

section! {
    /// The router: where clients connect, and how much it takes on.
    pub struct Router = "router" {
        /// Where the OpenAI HTTP API, /health, /live and /metrics are served.
        http: SocketAddr = loopback(8000),
            "8000 is what clients of other servers expect; loopback until it is opened on purpose.";
        /// Where the gRPC API (baton.v1.Inference), health and reflection are served.
        grpc: SocketAddr = loopback(8001),
            "The port after HTTP's.";
        /// Further models beside that of [model], each as NAME=PATH: the name that its nodes have as
        /// model.name, and a path as in model.path, for tokenizer and chat template.
        models: Vec<Pair> = Vec::new(),
            "One cluster serves one model unless more are named.";
        /// Of these further models, files with a chat template as in model.chat_template, each as
        /// NAME=PATH.
        chat_templates: Vec<Pair> = Vec::new(),
            "As for the model of [model], whose own setting is model.chat_template.";
        /// Of these further models, how they write calls of tools as in model.tool_format, each as
        /// NAME=FORMAT.
        tool_formats: Vec<Pair> = Vec::new(),
            "As for the model of [model], whose own setting is model.tool_format.";
        /// Further names for models, each as ALIAS=NAME.
        aliases: Vec<Pair> = Vec::new(),
            "For clients that ask for a name they were built with.";
        /// Largest request body; a larger one is answered with 413.
        body_bytes_max: ByteSize = ByteSize::mib(4),
            "128 Ki tokens take about 1 MiB as text or as JSON ids; four times that.",
            ByteSize::kib(1)..=ByteSize::gib(1);
        /// Requests in work at once, waiting ones included; one more is answered with 429.
        requests_max: u32 = 1024,
            "Some hundred KiB each at worst, so the router stays under a few hundred MiB.",
            1..=1_000_000;
        /// Of these, requests that wait until a node has room, for whichever model; one more is answered
        /// with 429.
        waiting_max: u32 = 512,
            "Half of the requests: what waits longer than the other half takes is better refused.",
            0..=1_000_000;
        /// How long a request waits for a node that has room before it is answered with 503.
        waiting_timeout: Duration = secs(30),
            "Most clients give up after a minute; half of that leaves time for the answer.",
            secs(0)..=secs(3600);
        /// Attempts of one request in a row that emit no token, after lost nodes or failed transfers.
        attempts_max: u32 = 4,
            "A lost prefill node, a lost decode node and one Busy can befall one request; more is a storm.",
            1..=16;
        /// Time for a whole request. Over gRPC a client may name another; over HTTP none can.
        timeout: Duration = secs(600),
            "4,096 tokens at 10 a second take seven minutes.",
            secs(1)..=secs(86_400);
        /// How long a node may be silent on an attempt before it counts as lost and the next attempt
        /// begins. Once the decode node writes, only a token ends its silence; before that, while the
        /// request waits or its prompt is read, any change of load that the awaited node reports does.
        idle_timeout: Duration = secs(60),
            "Longer than the slowest step; raise it where one chunk of a prompt takes a minute.",
            secs(1)..=secs(86_400);
        /// The longest time over gRPC: a larger timeout_ms is refused, a later deadline of the call is
        /// brought down to it.
        timeout_max: Duration = secs(3600),
            "An hour covers the longest sequences on the slowest machines.",
            secs(1)..=secs(86_400);
        /// How long a client may leave its full stream unread before the stream ends.
        slow_client_timeout: Duration = secs(30),
            "Longer than a phone changing networks, short enough to free its blocks.",
            secs(1)..=secs(3600);
        /// Events kept for a client that reads slowly; beyond them its request waits.
        slow_client_events: u32 = 1024,
            "About 10 s of a fast answer, 200 KiB at most.",
            1..=65_536;
        /// How long requests in work may take after SIGTERM before they are ended.
        drain_timeout: Duration = secs(25),
            "Kubernetes kills 30 s after SIGTERM.",
            secs(0)..=secs(3600);
    }
}

section! {
    /// A prefill or decode node: its addresses, and how large its batch and memory are.
    pub struct Node = "node" {
        /// The node's name: letters, digits, '.', '_' and '-', at most 64.
        id: Option<String> = None,
            "Unset means role and port, such as decode-50061. In Kubernetes: the pod's name.";
        /// Where routers reach this node.
        grpc: SocketAddr = loopback(50_061),
            "Several nodes on one machine each need their own port.";
        /// Where /metrics, /live and /health are served.
        metrics: SocketAddr = loopback(0),
            "Port 0 takes any free port and logs it, so that nodes on one machine never collide.";
        /// Memory for KV blocks.
        kv_memory: Option<ByteSize> = None,
            "Unset means 1GiB on a CPU, 20,000 tokens of a 135M model in f32: give a node what its machine has to spare. On a GPU it means what gpu_memory_percent leaves.",
            ByteSize::mib(1)..=ByteSize::gib(16_384);
        /// Number of KV blocks, each of 16 tokens; overrides kv_memory.
        blocks: Option<u32> = None,
            "For tests and measurements that need an exact count.",
            2..=16_777_216;
        /// Rows of the running batch: sequences that advance in one step.
        slots: u32 = 64,
            "Decode gains little beyond 64 rows on a CPU; a GPU wants 256.",
            1..=4096;
        /// Tokens in one step, over all sequences, prompts and answers together.
        step_tokens: u32 = 512,
            "Large enough to fill the matrix units, small enough that answers are not held up long.",
            1..=65_536;
        /// The most tokens of one prompt in one step.
        chunk_tokens: u32 = 256,
            "Half a step: two prompts advance at once, and the first KV leaves early.",
            1..=65_536;
        /// Whether KV of past prompts is kept and found again while no block is needed elsewhere.
        prefix_cache: bool = true,
            "It costs nothing when nothing repeats; false is for measuring without it.";
        /// Steps in flight: launched, result not yet read.
        depth: u32 = 2,
            "One computes while the next is planned; more only delays seeing a stop.",
            1..=8;
        /// Whether a step may verify guessed tokens along with the known ones: off, or ngram, which
        /// guesses what followed the last time the sequence said the same. The answer is the same.
        speculate: Speculate = Speculate::Off,
            "Up to four times as fast where answers repeat their prompt, nothing elsewhere.";
        /// The most tokens guessed ahead for one sequence in one step.
        speculate_tokens: u32 = 8,
            "From here on each costs about what it brings, on a CPU and where answers do repeat.",
            1..=64;
        /// Steps of this many tokens carry no guesses, smaller ones up to it.
        speculate_step_tokens: u32 = 64,
            "Up to about here a CPU waits for the weights, beyond it for its arithmetic.",
            2..=65_536;
        /// How many tokens must repeat before what followed them is guessed.
        speculate_ngram_min: u32 = 3,
            "Two repeat by chance, in any prose; three seldom do.",
            1..=64;
        /// How many tokens are compared to find the best of several places that repeat.
        speculate_ngram_max: u32 = 8,
            "A line of code or half a sentence; beyond it places hardly differ in what follows.",
            1..=64;
        /// Where forwards run: cpu, cuda (an NVIDIA GPU), or auto, which takes a GPU that can serve and
        /// else the CPU. A GPU has no q8 and guesses nothing ahead: auto then takes the CPU.
        device: Device = Device::Auto,
            "A GPU is there to be used; cuda is refused where there is none, and baton doctor says why.";
        /// The GPU, by its UUID as baton doctor and nvidia-smi -L show it, or as much of it as is unique; with
        /// ranks one for each, separated by commas.
        gpu: Option<String> = None,
            "Unset means the first that the process is shown, or the first as many.";
        /// Processes that share the model, its ranks: each has as many of the heads as the others, and
        /// computes its part of every layer, on a GPU of its own (2, 4 or 8 of one host) or on CPUs.
        tp: u32 = 1,
            "One process is quickest until its device is too small or too slow; allowed are divisors of the model's KV heads.",
            1..=16;
        /// How much of the GPU's memory weights, activations and KV take together, in percent, where
        /// neither kv_memory nor blocks is set.
        gpu_memory_percent: u32 = 90,
            "What else runs on a GPU seldom wants more than a tenth; two nodes of one GPU take 45 each.",
            1..=100;
        /// What of that share KV leaves to CUDA graphs, and to kernels that are loaded when they first run.
        gpu_reserve: ByteSize = ByteSize::gib(1),
            "More than they were seen to take; the log says at start what they did.",
            ByteSize::mib(1)..=ByteSize::gib(1_024);
        /// How long a start may take to find the quickest algorithms for the model's matrix products on
        /// this GPU; 0s: not at all. What it finds the next start knows, what it leaves the next finds.
        gpu_tune: Duration = secs(2),
            "Enough for an 8B model on an H200, once.",
            secs(0)..=secs(600);
        /// The folder where the algorithms found are kept, by GPU, driver and cuBLASLt.
        gpu_tune_dir: Option<PathBuf> = None,
            "Unset means baton in XDG_CACHE_HOME, else .cache/baton in HOME, else nowhere: every start finds them again.";
        /// While a step runs on the GPU, the thread that plans steps keeps its core awake instead of
        /// sleeping. A core that slept finds its caches empty: what it does between steps takes twice as long.
        gpu_poll: bool = true,
            "A GPU costs more than a core; where nodes share few cores, false leaves theirs to others.";
        /// The library of our own GPU kernels, as make kernels builds it.
        kernels: Option<PathBuf> = None,
            "Unset means libbaton_kernels.so beside the program.";
        /// Threads that compute.
        threads: Option<u32> = None,
            "Unset means as many as node.cpus or node.numa_node name, else as the process may use at once.",
            1..=1024;
        /// CPUs for the threads that compute, one each, in this order: numbers and ranges as Linux
        /// writes them. Other threads run where the system likes.
        cpus: Option<CpuList> = None,
            "The system places threads well until several nodes share a machine.";
        /// The NUMA node whose CPUs these threads take, in place of a list. Weights and KV are first
        /// touched by threads on these CPUs, so their memory is that node's.
        numa_node: Option<u32> = None,
            "For machines of several sockets: one baton node on each reads no memory of the other.",
            0..=1023;
        /// The instructions that forwards use: auto takes the fastest that the machine has, the
        /// others are refused where they are missing.
        isa: Isa = Isa::Auto,
            "Another one is for comparing machines: f32 has the same bits from avx2 up.";
        /// Sequences that wait for a slot; one more is answered Busy and tried elsewhere.
        waiting_max: u32 = 256,
            "Four full batches; a longer queue belongs in the router.",
            0..=65_536;
        /// Longest sequence, prompt and answer, in tokens.
        sequence_tokens_max: Option<u32> = None,
            "Unset means what the model was trained for, as far as the blocks reach.",
            16..=16_777_216;
        /// How long sequences in work may take after SIGTERM before they are ended.
        drain_timeout: Duration = secs(25),
            "Kubernetes kills 30 s after SIGTERM.",
            secs(0)..=secs(3600);
    }
}

section! {
    /// How KV travels from prefill to decode nodes. The same secret on every node.
    pub struct Transfer = "transfer" {
        /// Where this node hears notices of its peers (ZeroMQ).
        notice: SocketAddr = loopback(0),
            "Port 0 takes any free port: peers learn it from the router. Fix it behind a firewall.";
        /// What carries KV to and from other nodes: tcp; from GPU to GPU of one host ipc, by copy engines,
        /// or nccl, by kernels of both; or auto, the fastest that both nodes of a pair can do.
        transport: Transport = Transport::Auto,
            "With a node that cannot do what is set here KV goes by tcp: log and metrics say so.";
        /// Multiprocessors of each GPU that nccl takes for a pair of nodes while it moves KV.
        nccl_blocks: u32 = 4,
            "Each carries 30 GB/s on an H200; of two nodes the smaller number holds. Up to 4 are left to it by decoding \
             steps of few sequences where transport is nccl, which are no longer for that; more than 4 delay the \
             steps beside them, by up to 40 % with 8 or 16.",
            1..=64;
        /// Whether KV that goes from GPU to GPU is hashed at both ends. What goes by tcp always is.
        verify: bool = false,
            "Each GPU reads once more what went, in 0.08 ms for 256 MiB on an H200, before the next step of its way.";
        /// Where this node receives KV, or hears where it lies.
        data: SocketAddr = loopback(0),
            "Port 0 as above.";
        /// Host name or IP address under which peers reach the two; needed when they listen on all.
        /// With etcd also the host of node.grpc when that listens on all.
        advertise: Option<String> = None,
            "Unset means the address that notice listens on.";
        /// The most bytes of KV sent in one chunk.
        chunk_bytes: Option<ByteSize> = None,
            "Unset means 4MiB, 2 ms at 2 GB/s, and on a GPU 32MiB, 0.1 ms: long enough to be efficient, short enough to overlap with computing.",
            ByteSize::kib(4)..=ByteSize::mib(256);
        /// What all nodes of a cluster share; notices without its tag are not believed. Prefer
        /// secret_file or the environment: flags are visible to every user of the machine.
        secret: Option<Secret> = None,
            "There is none, so that nobody runs with a known one. Make one: openssl rand -hex 32.";
        /// A file that holds the secret.
        secret_file: Option<PathBuf> = None,
            "The way of Kubernetes and Docker; only one of secret and secret_file may be set.";
    }
}

section! {
    /// How router and nodes find each other: by a list that the router reads, or through etcd.
    pub struct Cluster = "cluster" {
        /// gRPC addresses of prefill nodes.
        prefill: Vec<GrpcUrl> = Vec::new(),
            "Without any, decode nodes read prompts themselves.";
        /// gRPC addresses of decode nodes.
        decode: Vec<GrpcUrl> = Vec::new(),
            "At least one is needed before the router is ready.";
        /// Endpoints of an etcd cluster. Nodes then register there and routers follow it, so that
        /// nodes join and leave while everything runs; prefill and decode stay empty.
        etcd: Vec<EtcdUrl> = Vec::new(),
            "A list needs nothing else to run.";
        /// What the cluster's keys in etcd begin with; clusters that share an etcd need one each.
        etcd_prefix: EtcdPrefix = EtcdPrefix::default(),
            "One cluster needs no name; /baton/staging is a second one.";
        /// The etcd user; it needs read and write permission on the prefix, for routers read alone.
        etcd_user: Option<String> = None,
            "etcd asks nobody's name until its operator enables authentication.";
        /// The etcd user's password. Prefer the environment: flags are visible to every user of the
        /// machine.
        etcd_password: Option<Password> = None,
            "Goes with etcd_user.";
        /// A PEM file with the certificate authority that signed etcd's certificate.
        etcd_ca: Option<PathBuf> = None,
            "Needed exactly when the endpoints are https; no authority is trusted unasked.";
        /// A PEM file with the certificate that this process shows to etcd.
        etcd_cert: Option<PathBuf> = None,
            "For an etcd that asks its clients for certificates; needs etcd_key.";
        /// A PEM file with the key of etcd_cert.
        etcd_key: Option<PathBuf> = None,
            "Goes with etcd_cert.";
        /// How long etcd keeps a node's record after the node last renewed it, in whole seconds.
        etcd_ttl: Duration = secs(10),
            "Routers notice a lost node themselves within 2.5 s: this only removes its record.",
            secs(2)..=secs(3600);
    }
}

section! {
    /// What a service tells about itself.
    pub struct Telemetry = "telemetry" {
        /// What is logged: a level (error, warn, info, debug, trace), or levels by module such as
        /// info,router=debug.
        log: String = "info".into(),
            "One line for each start, stop, failure and change of health; none per token. Release \
             builds leave trace out.";
        /// pretty for people, json for collectors, auto: pretty on a terminal, json otherwise.
        log_format: LogFormat = LogFormat::Auto,
            "Right in a terminal and in a container without being set.";
        /// Where traces and metrics are sent by OTLP over gRPC.
        otlp: Option<GrpcUrl> = None,
            "Off unless set; a collector usually listens on port 4317.";
        /// Tells this process from others of its kind in traces and metrics.
        instance: Option<String> = None,
            "Unset means the node's id, or router and its port.";
    }
}
