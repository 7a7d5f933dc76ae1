//! `baton node`: lists the nodes of a router and calls them through the router's admin API.

use std::{
    io::Write,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use serde_json::Value;
use tempfile::NamedTempFile;

use crate::{
    admin_client::AdminArgs,
    http_client::{GET_WITHIN, json_answer},
    table::aligned,
};

#[derive(Subcommand)]
pub enum NodeCommand {
    /// Lists the nodes with role, health and load.
    List(AdminArgs),
    /// Makes a node finish its requests and reject new ones.
    Drain(NodeArgs),
    /// Lets a drained node accept requests again.
    Undrain(NodeArgs),
    /// Drops a node's cached KV blocks, except blocks that requests use.
    ResetPrefixCache(NodeArgs),
    /// Records the steps of a node, its transfers, and the saves and loads of its KV tiers, as a
    /// trace for Perfetto or chrome://tracing.
    Trace(TraceArgs),
}

#[derive(Args)]
pub struct NodeArgs {
    /// Id or URL of the node, as `baton node list` prints them.
    node: String,
    #[command(flatten)]
    admin: AdminArgs,
}

#[derive(Args)]
pub struct TraceArgs {
    /// Time to record. A node keeps at most 20,000 steps, saves, loads and transfers, and ends a
    /// full trace earlier.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=60))]
    seconds: u32,
    /// File to write.
    #[arg(long, default_value = "trace.json", value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    node: NodeArgs,
}

pub fn run(command: NodeCommand) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let text = runtime.block_on(async {
        match command {
            NodeCommand::List(admin) => {
                Ok(table(&admin.client(GET_WITHIN)?.call("GET", "/v1/nodes").await?))
            }
            NodeCommand::Drain(node) => node.call("drain").await,
            NodeCommand::Undrain(node) => node.call("undrain").await,
            NodeCommand::ResetPrefixCache(node) => node.call("reset-prefix-cache").await,
            NodeCommand::Trace(args) => args.record().await,
        }
    });
    println!("{}", text?);
    Ok(())
}

impl NodeArgs {
    async fn call(&self, call: &str) -> Result<String> {
        let path = format!("/v1/nodes/{}/{call}", path_segment(&self.node));
        let answer = self.admin.client(GET_WITHIN)?.call("POST", &path).await?;
        let count = |name: &str| answer[name].as_u64();
        Ok(match (count("attempts_in_flight"), count("dropped_blocks")) {
            (Some(attempts), _) => format!("{}: {call}, {attempts} attempts in flight", self.node),
            (_, Some(blocks)) => format!("{}: {call}, {blocks} blocks dropped", self.node),
            _ => answer.to_string(),
        })
    }
}

impl TraceArgs {
    async fn record(&self) -> Result<String> {
        let Self { seconds, output, node: NodeArgs { node, admin } } = self;
        let shown = output.display();
        let cannot_write = || format!("cannot write --output {shown}");
        // An invalid path must not cost a minute, and a failure must not cost an older trace.
        let folder = output.parent().filter(|folder| *folder != "").unwrap_or(Path::new("."));
        let mut file = NamedTempFile::new_in(folder).with_context(cannot_write)?;
        // The router's deadline is shorter, and its error tells more.
        let within = 2 * GET_WITHIN + Duration::from_secs((*seconds).into());
        let path = format!("/v1/nodes/{}/trace?seconds={seconds}", path_segment(node));
        let (url, body) = admin.client(within)?.body("POST", &path).await?;
        let about = json_answer(&url, &body)?["otherData"].take();
        file.write_all(&body).with_context(cannot_write)?;
        file.persist(output).with_context(cannot_write)?;
        let (time, steps) = (about["seconds"].as_f64().unwrap_or_default(), &about["steps"]);
        let full = if about["is_full"] == true { ", then the trace was full" } else { "" };
        Ok(format!("{node}: {steps} steps in {time:.1} s{full}: {shown}"))
    }
}

/// Returns a node's id or URL as one segment of a path.
fn path_segment(node: &str) -> String {
    node.replace('%', "%25").replace('/', "%2F")
}

/// Returns the nodes as lines of aligned columns.
fn table(answer: &Value) -> String {
    let nodes = answer["nodes"].as_array().map(Vec::as_slice).unwrap_or_default();
    let text = |value: &Value| match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let columns = ["node", "role", "health", "draining", "running", "waiting", "model", "grpc"];
    let head = columns.map(str::to_uppercase);
    let rows = nodes.iter().map(|node| columns.map(|column| text(&node[column])));
    aligned(head.each_ref().map(String::as_str), &rows.collect::<Vec<_>>()).join("\n")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn nodes_are_listed_in_aligned_columns() {
        let answer = json!({"nodes": [
            {"node": "prefill-0", "role": "prefill", "health": "up", "draining": false, "running": 1,
                "waiting": 0, "model": "m", "grpc": "http://a:1"},
            {"node": null, "role": "decode", "health": "down", "draining": false, "running": 0,
                "waiting": 0, "model": null, "grpc": "http://b:1"},
        ]});
        let lines = table(&answer);
        let [head, first, second] = lines.lines().collect::<Vec<_>>()[..] else {
            panic!("{lines}")
        };
        assert!(head.starts_with("NODE       ROLE     HEALTH  DRAINING"), "{lines}");
        assert!(first.starts_with("prefill-0  prefill  up      false"), "{lines}");
        assert!(second.starts_with("-          decode   down    false"), "{lines}");
        assert_eq!(head.find("GRPC"), second.find("http://b:1"), "{lines}");
    }
}
