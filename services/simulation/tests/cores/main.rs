//! The cores that the simulation runs are pure: no module of a core uses a socket, a file, a clock,
//! a task, a metric, a span, or a type of gRPC or HTTP, neither itself nor through a module that it
//! uses.

mod module_graph;

use std::{
    collections::{BTreeMap, VecDeque},
    fs,
    path::Path,
};

use module_graph::{ModuleGraph, Segments, Target};

/// The modules of each core. A module includes the modules below.
const CORES: [&str; 12] = [
    "cluster",
    "engine::block_pool",
    "engine::prefix_cache",
    "engine::scheduler",
    "engine::step_loop",
    "engine::tiers",
    "kv_transfer::driver",
    "kv_transfer::protocol",
    "node::node_core",
    "router_core",
    "sessions",
    "weight_transfer",
];

/// Traits and types between a core and its shell. A core uses them, but not what they use.
const SEAMS: [&str; 5] = [
    // The trait of matchers, and the jobs that worker threads run with a clock.
    "engine::constraint",
    // The trait of devices. Its methods name the types of checkpoints and of chunks in GPU memory.
    "engine::executor",
    // Threads that compute token bitmasks while a step runs. In the simulation there are none.
    "engine::mask_workers",
    // The memory of KV. A core names its errors.
    "kernels::arena",
    // The generated messages. The generated clients and servers are forbidden by name.
    "proto::v1",
];

/// Crates, types and functions that no core uses. A core may write a line to the log.
const FORBIDDEN: [&str; 32] = [
    "anyhow",
    "axum",
    "credentials",
    "cudarc",
    "etcd_client",
    "futures_util",
    "http",
    "http_body",
    "hyper",
    "hyper_util",
    "opentelemetry",
    "reqwest",
    "rustls",
    "socket2",
    "std::env",
    "std::fs",
    "std::net::TcpListener",
    "std::net::TcpStream",
    "std::net::UdpSocket",
    "std::process",
    "std::thread",
    "std::time::Instant::now",
    "std::time::SystemTime",
    "telemetry",
    "tokio",
    "tokio_util",
    "tonic",
    "tower",
    "tracing::Span",
    "tracing::info_span",
    "tracing::instrument",
    "zmq",
];

fn workspace() -> ModuleGraph {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut graph = ModuleGraph::default();
    for folder in ["kernels", "proto", "services/simulation/base"] {
        graph.add_crate(&root.join(folder));
    }
    for service in fs::read_dir(root.join("services")).expect("the folder exists") {
        graph.add_crate(&service.expect("the folder is readable").path());
    }
    graph
}

fn segments(path: &str) -> Segments {
    path.split("::").map(str::to_owned).collect()
}

fn path_of(target: &Target) -> &Segments {
    let (Target::Item(path) | Target::Namespace(path) | Target::External(path)) = target;
    path
}

fn is_forbidden(path: &[String]) -> bool {
    let is_service = |name: &String| name.ends_with("_client") || name.ends_with("_server");
    let is_generated_service =
        path.starts_with(&segments("proto::v1")) && path.iter().any(is_service);
    is_generated_service || FORBIDDEN.iter().any(|forbidden| path.starts_with(&segments(forbidden)))
}

/// Returns the modules from a root to `module`, and the path that `module` uses.
fn way(
    reached: &BTreeMap<Segments, Option<Segments>>,
    module: &Segments,
    used: &[String],
) -> String {
    let users = std::iter::successors(Some(module), |user| reached.get(*user)?.as_ref());
    let mut way: Vec<String> = users.map(|user| user.join("::")).collect();
    way.reverse();
    way.push(used.join("::"));
    way.join(" → ")
}

/// Returns the forbidden uses of these modules, each with the modules on the way.
fn forbidden_uses(graph: &ModuleGraph, roots: &[&str]) -> Vec<String> {
    let mut queue: VecDeque<Segments> = VecDeque::new();
    // The module that each module was reached from.
    let mut reached: BTreeMap<Segments, Option<Segments>> = BTreeMap::new();
    for root in roots {
        let before = queue.len();
        for module in graph.below(&segments(root)) {
            reached.insert(module.clone(), None);
            queue.push_back(module.clone());
        }
        assert!(queue.len() > before, "there is no module {root}");
    }
    let mut uses = Vec::new();
    while let Some(module) = queue.pop_front() {
        for target in graph.uses(&module) {
            let path = path_of(&target);
            if is_forbidden(path) {
                uses.push(way(&reached, &module, path));
            } else if matches!(target, Target::Item(_))
                && !SEAMS.contains(&&path.join("::")[..])
                && !reached.contains_key(path)
            {
                reached.insert(path.clone(), Some(module.clone()));
                queue.push_back(path.clone());
            }
        }
    }
    uses
}

#[test]
fn cores_use_no_io_metric_span_or_grpc_type() {
    let uses = forbidden_uses(&workspace(), &CORES);
    assert!(uses.is_empty(), "a core uses what only a shell may use:\n{}", uses.join("\n"));
}

/// Without this test the walk could find nothing because it reads nothing.
#[test]
fn io_of_a_shell_is_found() {
    let graph = workspace();
    for (shell, used) in [
        ("kv_transfer::shell", "std::time::Instant::now"),
        ("node::engine_thread", "telemetry::metrics::node"),
        ("node::service", "tonic::Status"),
    ] {
        let uses = graph.uses(&segments(shell));
        let mut used = uses.iter().filter(|target| *path_of(target) == segments(used));
        assert!(used.any(|target| is_forbidden(path_of(target))), "{shell}: {uses:?}");
    }
}
