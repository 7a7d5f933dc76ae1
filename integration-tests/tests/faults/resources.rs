//! Services with a full log disk, with too few open files, or with a read-only file system.

use std::{
    collections::BTreeMap,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use integration_tests::{
    client::{Client, DEADLINE, greedy_body},
    cluster::{Cluster, ClusterSpec, SECRET, Service, smollm2},
    golden::run_named,
};
use test_harness::skip;

/// Returns the settings of a router that uses the cluster's nodes.
fn router_settings(cluster: &Cluster) -> BTreeMap<String, String> {
    router_settings_of(&cluster.prefill[0], &cluster.decode[0])
}

fn router_settings_of(prefill: &Service, decode: &Service) -> BTreeMap<String, String> {
    let url = |node: &Service| format!("http://{}", node.ready.grpc);
    [
        ("BATON_MODEL_PATH", smollm2().display().to_string()),
        ("BATON_CLUSTER_SECRET", SECRET.to_owned()),
        ("BATON_ROUTER_HTTP", "127.0.0.1:0".to_owned()),
        ("BATON_ROUTER_GRPC", "127.0.0.1:0".to_owned()),
        ("BATON_ROUTER_ADMIN", "127.0.0.1:0".to_owned()),
        ("BATON_CLUSTER_PREFILL", url(prefill)),
        ("BATON_CLUSTER_DECODE", url(decode)),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}

/// Returns the settings of a node beside a cluster.
fn node_settings() -> BTreeMap<String, String> {
    [
        ("BATON_MODEL_PATH", smollm2().display().to_string()),
        ("BATON_MODEL_DTYPE", "f32".to_owned()),
        ("BATON_CLUSTER_SECRET", SECRET.to_owned()),
        ("BATON_NODE_GRPC", "127.0.0.1:0".to_owned()),
        ("BATON_NODE_METRICS", "127.0.0.1:0".to_owned()),
        ("BATON_TRANSFER_CONTROL", "127.0.0.1:0".to_owned()),
        ("BATON_TRANSFER_DATA", "127.0.0.1:0".to_owned()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}

/// A prefill node, a decode node that a wrapper starts, and a router that uses both.
struct WrappedNode {
    cluster: Cluster,
    node: Service,
    router: Service,
    client: Client,
}

impl WrappedNode {
    async fn start(
        wrapper: &[&str],
        folder: &Path,
        settings: &BTreeMap<String, String>,
    ) -> Result<Self> {
        let cluster = Cluster::start(ClusterSpec::smollm2()).await?;
        let program = "baton-decode-node";
        let mut node = Service::spawn_by(wrapper, folder, "wrapped", program, settings)?;
        node.wait_ready(folder)?;
        let settings = router_settings_of(&cluster.prefill[0], &node);
        let router = Service::start(folder, "router", "baton-router", &settings)?;
        let client = Client::new(format!("http://{}", router.ready.http));
        Ok(Self { cluster, node, router, client })
    }

    /// Stops all processes. None may have ended before.
    fn stop(mut self) -> Result<()> {
        for service in [&mut self.router, &mut self.node] {
            service.terminate_signal();
            assert_eq!(service.wait_end(Duration::from_secs(20))?, Some(0), "{}", service.name);
        }
        self.cluster.stop()
    }
}

async fn answer_is_right(client: &Client) -> Result<()> {
    let run = run_named("code");
    assert_eq!(client.greedy(&run.prompt_ids, 16).await?, run.output_ids[..16]);
    Ok(())
}

/// `/dev/full` fails every write like a full disk.
pub(crate) async fn full_disk_of_the_log_disturbs_no_request() -> Result<()> {
    let cluster = Cluster::start(ClusterSpec::smollm2()).await?;
    let folder = tempfile::tempdir()?;
    let wrapper = ["sh", "-c", "exec \"$@\" >/dev/full 2>/dev/full", "sh"];
    let mut settings = router_settings(&cluster);
    // Writes a line for each event.
    settings.insert("BATON_TELEMETRY_LOG".to_owned(), "debug".to_owned());
    let mut router =
        Service::spawn_by(&wrapper, folder.path(), "router", "baton-router", &settings)?;
    router.wait_ready(folder.path())?;
    let client = Client::new(format!("http://{}", router.ready.http));
    for _ in 0..8 {
        answer_is_right(&client).await?;
    }
    router.terminate_signal();
    assert_eq!(router.wait_end(Duration::from_secs(20))?, Some(0));
    cluster.stop()
}

pub(crate) async fn full_disk_of_the_log_of_a_node_disturbs_no_request() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let wrapper = ["sh", "-c", "exec \"$@\" >/dev/full 2>/dev/full", "sh"];
    let mut settings = node_settings();
    settings.insert("BATON_TELEMETRY_LOG".to_owned(), "debug".to_owned());
    let all = WrappedNode::start(&wrapper, folder.path(), &settings).await?;
    for _ in 0..8 {
        answer_is_right(&all.client).await?;
    }
    all.stop()
}

/// Strangers take all files of a node. The request in flight continues, and the node serves when
/// they have left.
pub(crate) async fn limit_of_open_files_of_a_node_disturbs_no_request_in_flight() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let wrapper = ["sh", "-c", "ulimit -n 160; exec \"$@\"", "sh"];
    let all = WrappedNode::start(&wrapper, folder.path(), &node_settings()).await?;
    answer_is_right(&all.client).await?;
    let run = run_named("code");
    let body = greedy_body(&run.prompt_ids, 48);
    let mut stream = all.client.stream("/v1/completions", &body).await?;
    let idle: Vec<_> =
        (0..300).map_while(|_| std::net::TcpStream::connect(&all.node.ready.grpc).ok()).collect();
    ensure!(idle.len() > 160, "the system accepts only {} connections", idle.len());
    assert_eq!(stream.token_ids().await?, run.output_ids);
    drop(idle);
    answer_is_right(&all.client).await?;
    let files = std::fs::read_dir(format!("/proc/{}/fd", all.node.id()))?.count();
    ensure!(files < 160, "{files} files are open");
    all.stop()
}

/// Connections beyond the limit wait or are rejected, and the router serves again when clients have
/// left.
pub(crate) async fn limit_of_open_files_rejects_connections_and_recovers() -> Result<()> {
    let cluster = Cluster::start(ClusterSpec::smollm2()).await?;
    let folder = tempfile::tempdir()?;
    let wrapper = ["sh", "-c", "ulimit -n 96; exec \"$@\"", "sh"];
    let settings = router_settings(&cluster);
    let mut router =
        Service::spawn_by(&wrapper, folder.path(), "router", "baton-router", &settings)?;
    router.wait_ready(folder.path())?;
    let http = router.ready.http.clone();
    let client = Client::new(format!("http://{http}"));
    answer_is_right(&client).await?;
    let run = run_named("code");
    let mut stream = client.stream("/v1/completions", &greedy_body(&run.prompt_ids, 48)).await?;
    // More idle connections than the router has files.
    let idle: Vec<_> = (0..200).map_while(|_| std::net::TcpStream::connect(&http).ok()).collect();
    ensure!(idle.len() > 96, "the system accepts only {} connections", idle.len());
    // A request in flight is not disturbed.
    assert_eq!(stream.token_ids().await?, run.output_ids);
    drop(idle);
    let deadline = Instant::now() + DEADLINE;
    loop {
        let other = Client::new(format!("http://{http}"));
        let asked = tokio::time::timeout(Duration::from_secs(5), answer_is_right(&other)).await;
        if matches!(asked, Ok(Ok(()))) {
            break;
        }
        ensure!(Instant::now() < deadline, "{}", router.log());
    }
    let limit = std::fs::read_to_string(format!("/proc/{}/limits", router.id()))?;
    let limit = limit.lines().find(|line| line.starts_with("Max open files"));
    ensure!(limit.is_some_and(|line| line.contains(" 96 ")), "{limit:?}");
    router.terminate_signal();
    assert_eq!(router.wait_end(Duration::from_secs(20))?, Some(0));
    cluster.stop()
}

/// Returns a command prefix that runs a program with this folder mounted read-only. Skips the test
/// where no folder can be mounted.
fn read_only(folder: &Path) -> Vec<String> {
    let folder = folder.display();
    let mount = format!(
        "mount --bind '{folder}' '{folder}' && mount -o remount,ro,bind '{folder}' && exec \"$@\""
    );
    for namespaces in [&["--mount"][..], &["--user", "--map-root-user", "--mount"]] {
        let shell = ["sh", "-c", &mount, "sh"];
        let command = ["unshare"].iter().chain(namespaces).chain(&shell);
        let command: Vec<String> = command.map(|&word| word.to_owned()).collect();
        let tried = Command::new(&command[0]).args(&command[1..]).arg("true").status();
        if tried.is_ok_and(|status| status.success()) {
            return command;
        }
    }
    skip("no mount namespace: unshare is missing, or neither root nor user namespaces may mount");
}

/// A disk that became read-only takes only the tier from its node.
pub(crate) async fn node_whose_disk_tier_is_read_only_serves_without_it() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let disk = folder.path().join("disk");
    std::fs::create_dir(&disk)?;
    std::fs::write(disk.join("kv"), "")?;
    let wrapper = read_only(&disk);
    let wrapper: Vec<&str> = wrapper.iter().map(String::as_str).collect();
    let mut settings = node_settings();
    for (name, value) in [
        ("BATON_NODE_BLOCKS", "64".to_owned()),
        ("BATON_TIER_DISK_PATH", disk.join("kv").display().to_string()),
        ("BATON_TIER_DISK_SIZE", "64MiB".to_owned()),
    ] {
        settings.insert(name.to_owned(), value);
    }
    let all = WrappedNode::start(&wrapper, folder.path(), &settings).await?;
    answer_is_right(&all.client).await?;
    all.node.wait_logged(&["tier.disk_path"]).await?;
    let log = all.node.log();
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("tier.disk_path")).collect();
    let reason = "cannot open it: Read-only file system";
    assert!(matches!(lines[..], [line] if line.contains(reason)), "{log}");
    all.stop()
}
