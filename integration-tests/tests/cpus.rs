//! Compute threads of a node are pinned to the node's CPUs; its other threads are not.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use integration_tests::{
    client::Client,
    cluster::{Cluster, ClusterSpec, SECRET, Service, smollm2},
    golden::run_named,
};

const NUMA_NODES: &str = "/sys/devices/system/node";

/// Parses a CPU list such as `0-1,4`.
fn listed(text: &str) -> Result<Vec<u32>> {
    let mut cpus = Vec::new();
    // A NUMA node without CPUs has an empty list.
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        cpus.extend(first.parse::<u32>()?..=last.parse()?);
    }
    Ok(cpus)
}

/// Returns `Cpus_allowed_list` of a status file.
fn allowed(status: &Path) -> Result<Vec<u32>> {
    let text = std::fs::read_to_string(status)?;
    let line = text.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    listed(line.with_context(|| format!("{} names no CPUs", status.display()))?)
}

/// Returns the threads of a process by name, with the CPUs that each may run on.
fn threads(process: u32) -> Result<Vec<(String, Vec<u32>)>> {
    let mut threads = Vec::new();
    for task in std::fs::read_dir(format!("/proc/{process}/task"))? {
        let task: PathBuf = task?.path();
        // A thread may end during the listing.
        if let Ok(name) = std::fs::read_to_string(task.join("comm"))
            && let Ok(cpus) = allowed(&task.join("status"))
        {
            threads.push((name.trim().to_owned(), cpus));
        }
    }
    Ok(threads)
}

/// Returns the CPUs of the only thread with this name. The kernel keeps 15 characters of a name.
fn of<'a>(threads: &'a [(String, Vec<u32>)], name: &str) -> Result<&'a [u32]> {
    let kept = &name[..name.len().min(15)];
    let mut found = threads.iter().filter(|(name, _)| name == kept);
    let (_, cpus) = found.next().with_context(|| format!("no {name} in {threads:?}"))?;
    assert!(found.next().is_none(), "two {name} in {threads:?}");
    Ok(cpus)
}

async fn compute_threads_are_pinned_to_the_configured_cpus_in_order() -> Result<()> {
    let all = allowed(Path::new("/proc/self/status"))?;
    let cpus: Vec<u32> = all.iter().rev().take(3).copied().collect();
    let list = cpus.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let spec = ClusterSpec::smollm2()
        .nodes(0, 1)
        .set("BATON_NODE_KV_MEMORY", "64MiB")
        .set("BATON_NODE_CPUS", list);
    let cluster = Cluster::start(spec).await?;
    let run = run_named("code");
    let found = Client::new(cluster.http()).greedy(&run.prompt_ids, 8).await?;
    assert_eq!(found, run.output_ids[..8]);

    let threads = threads(cluster.decode[0].id())?;
    assert_eq!(of(&threads, "baton-engine-cpu")?, &cpus[..1]);
    for (worker, cpu) in cpus.iter().enumerate().skip(1) {
        assert_eq!(of(&threads, &format!("baton-cpu-{worker}"))?, [*cpu]);
    }
    // There is no further worker, and RPC threads may run on any CPU.
    let workers = threads.iter().filter(|(name, _)| name.starts_with("baton-cpu-")).count();
    assert_eq!(workers, cpus.len() - 1, "{threads:?}");
    let main = cluster.decode[0].id();
    assert_eq!(allowed(Path::new(&format!("/proc/{main}/status")))?, all);
    for (name, cpus) in &threads {
        let computes = name.starts_with("baton-cpu") || name.starts_with("baton-engine-c");
        assert!(computes || name == "baton-populate" || cpus == &all, "{name} has {cpus:?}");
    }
    cluster.stop()
}

/// Returns the first NUMA node with CPUs that this process may use, and those CPUs.
fn usable_numa_node() -> Result<Option<(u32, Vec<u32>)>> {
    let all = allowed(Path::new("/proc/self/status"))?;
    let mut nodes: Vec<u32> = std::fs::read_dir(NUMA_NODES)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.strip_prefix("node")?.parse().ok())
        .collect();
    nodes.sort_unstable();
    for node in nodes {
        let text = std::fs::read_to_string(format!("{NUMA_NODES}/node{node}/cpulist"))?;
        let mut cpus = listed(&text)?;
        cpus.retain(|cpu| all.contains(cpu));
        if !cpus.is_empty() {
            return Ok(Some((node, cpus)));
        }
    }
    Ok(None)
}

async fn numa_node_setting_selects_its_cpus() -> Result<()> {
    let Some((node, cpus)) = usable_numa_node()? else {
        test_harness::skip(format!("{NUMA_NODES} lists no NUMA node with a CPU of this process"));
    };
    let spec = ClusterSpec::smollm2()
        .nodes(0, 1)
        .set("BATON_NODE_KV_MEMORY", "64MiB")
        .set("BATON_NODE_NUMA_NODE", node);
    let cluster = Cluster::start(spec).await?;
    let threads = threads(cluster.decode[0].id())?;
    assert_eq!(of(&threads, "baton-engine-cpu")?, &cpus[..1]);
    for (worker, cpu) in cpus.iter().enumerate().skip(1) {
        assert_eq!(of(&threads, &format!("baton-cpu-{worker}"))?, [*cpu]);
    }
    cluster.stop()
}

fn unknown_cpu_or_numa_node_is_rejected_at_start() -> Result<()> {
    let all = allowed(Path::new("/proc/self/status"))?;
    let beyond = all.last().context("there is a CPU")? + 1;
    let folder = tempfile::tempdir()?;
    for (variable, value, words) in [
        ("BATON_NODE_CPUS", format!("{},{beyond}", all[0]), ["node.cpus", "no CPU", "expected "]),
        ("BATON_NODE_CPUS", "3-1".to_owned(), ["node.cpus", "3-1", "such as 0-3,8"]),
        ("BATON_NODE_NUMA_NODE", "1023".to_owned(), ["node.numa_node", "1023", "expected "]),
    ] {
        let settings: BTreeMap<String, String> = [
            ("BATON_MODEL_PATH", smollm2().display().to_string()),
            ("BATON_CLUSTER_SECRET", SECRET.to_owned()),
            ("BATON_NODE_GRPC", "127.0.0.1:0".to_owned()),
            (variable, value),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into();
        let started = Service::start(folder.path(), "node", "baton-decode-node", &settings);
        let said = started.err().context("the node starts")?.to_string();
        let is_it = |line: &&str| words.iter().all(|word| line.contains(word));
        assert_eq!(said.lines().filter(is_it).count(), 1, "{said}");
        assert!(!said.contains("opened the model"), "{said}");
    }
    Ok(())
}

fn main() -> std::process::ExitCode {
    let mut tests = test_harness::async_tests![
        compute_threads_are_pinned_to_the_configured_cpus_in_order,
        numa_node_setting_selects_its_cpus,
    ];
    tests.extend(test_harness::tests![unknown_cpu_or_numa_node_is_rejected_at_start,]);
    test_harness::main(&[], tests)
}
