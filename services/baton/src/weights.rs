//! `baton weights`: updates the weights of a cluster's nodes through the router's admin API.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, Subcommand};
use serde_json::{Value, json};

use crate::{
    client_args::ClientArgs,
    http_client::{error_message, json_answer},
};

const CONNECT_MAX: Duration = Duration::from_secs(2);
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Time beyond the update's own time-out until the command gives up: the router commits for up to
/// 60 s.
const GRACE: Duration = Duration::from_secs(90);

#[derive(Subcommand)]
pub enum WeightsCommand {
    /// Loads the weights at a path into every node of a model, and commits them on all nodes or
    /// none.
    Push(PushArgs),
    /// Shows the weights of every node, and the running or last update.
    Status(WeightsAdminArgs),
    /// Aborts an update that is not committed.
    Abort(AbortArgs),
}

#[derive(Args)]
pub struct WeightsAdminArgs {
    /// Address of the router's admin API (`router.admin`).
    #[arg(long = "to", default_value = "http://127.0.0.1:8002", value_name = "URL")]
    to: String,
    #[command(flatten)]
    client: ClientArgs,
}

#[derive(Args)]
pub struct PushArgs {
    /// Path of the model on every node: a folder with config.json and safetensors, or a GGUF file.
    path: std::path::PathBuf,
    /// Name of the weights in logs and reports.
    #[arg(long, default_value = "", value_name = "TEXT")]
    label: String,
    /// Model whose nodes are updated [default: the first model of the router].
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// How nodes obtain the weights: disk reads the path on every node; tcp reads it on one node,
    /// from which the others copy.
    #[arg(long, default_value = "disk", value_parser = ["disk", "tcp"])]
    transport: String,
    /// With tcp, the id or URL of the node that has the path [default: the first node].
    #[arg(long, value_name = "NODE")]
    node: Option<String>,
    /// Requests in flight at the commit: recompute computes their KV again with the new weights,
    /// keep_kv continues on the KV of the old ones, wait lets them finish first, for at most 30 s,
    /// and abort ends them with finish reason abort.
    #[arg(long, default_value = "recompute", value_parser = ["recompute", "keep_kv", "wait", "abort"])]
    in_flight: String,
    /// Seconds until the update is aborted unless it is committed.
    #[arg(long, default_value_t = 300, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=3600))]
    timeout: u32,
    #[command(flatten)]
    admin: WeightsAdminArgs,
}

#[derive(Args)]
pub struct AbortArgs {
    /// Id of the update, as `baton weights status` prints it.
    id: String,
    #[command(flatten)]
    admin: WeightsAdminArgs,
}

pub fn run(command: WeightsCommand) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let text = runtime.block_on(async {
        match command {
            WeightsCommand::Push(push) => push.run().await,
            WeightsCommand::Status(admin) => Ok(report(&admin.call("GET", "", None).await?)),
            WeightsCommand::Abort(AbortArgs { id, admin }) => {
                Ok(report(&admin.call("POST", &format!("/{id}/abort"), None).await?))
            }
        }
    });
    println!("{}", text?);
    Ok(())
}

impl PushArgs {
    async fn run(self) -> Result<String> {
        // A relative path means a file of this machine, which the nodes share.
        let path = std::path::absolute(&self.path)
            .with_context(|| format!("invalid path {}", self.path.display()))?;
        let mut body = json!({
            "path": path.to_str().ok_or_else(|| anyhow!("invalid path {}; expected UTF-8", path.display()))?,
            "label": self.label,
            "timeout_s": self.timeout,
            "commit": true,
            "transport": self.transport,
            "in_flight": self.in_flight,
        });
        if let Some(node) = &self.node {
            body["node"] = json!(node);
        }
        if let Some(model) = &self.model {
            body["model"] = json!(model);
        }
        let began = Instant::now();
        let mut answer = self.admin.call("POST", "/begin", Some(&body)).await?;
        let id = answer["update"]["id"].as_str();
        let id = id.ok_or_else(|| {
            anyhow!(
                "the answer of {} has no update.id; expected the address of router.admin",
                self.admin.to
            )
        })?;
        let id = id.to_owned();
        let give_up = began + Duration::from_secs(self.timeout.into()) + GRACE;
        loop {
            let update = &answer["update"];
            if update["id"].as_str() != Some(&id) {
                bail!(
                    "cannot follow update {id}: the router does not know it, so its outcome is unknown"
                );
            }
            match update["phase"].as_str() {
                Some("committed") => {
                    let seconds = began.elapsed().as_secs_f64();
                    return Ok(format!("{}\ncommitted in {seconds:.2} s", report(&answer)));
                }
                Some("aborted") => {
                    let reason = update["reason"].as_str().unwrap_or("(no reason)");
                    bail!("cannot update the weights: {reason}");
                }
                _ if Instant::now() > give_up => bail!("update {id} has not ended in time"),
                _ => {}
            }
            tokio::time::sleep(POLL_INTERVAL).await;
            match self.admin.call("GET", &format!("?id={id}"), None).await {
                Ok(found) => answer = found,
                Err(error) if Instant::now() > give_up => {
                    return Err(error.context(format!("the outcome of update {id} is unknown")));
                }
                // The update continues while the router does not answer or rejects a poll.
                Err(_) => {}
            }
        }
    }
}

impl WeightsAdminArgs {
    async fn call(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
        let url = format!("{}/v1/weights{path}", self.to.trim_end_matches('/'));
        let client = self.client.client(CONNECT_MAX)?;
        let (status, body) = client.request_with(method, &url, body).await.with_context(|| {
            format!(
                "cannot reach the router's admin API at {}; expected the address of router.admin",
                self.to
            )
        })?;
        if !status.is_success() {
            bail!("{status}: {}", error_message(&body));
        }
        json_answer(&url, &body)
    }
}

/// Returns the update and the nodes as lines.
fn report(answer: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let mut lines = Vec::new();
    let update = &answer["update"];
    if update.is_object() {
        let label = update["label"].as_str().filter(|label| !label.is_empty());
        let label = label.map(|label| format!(" ({label})")).unwrap_or_default();
        let version = update["weight_version"].as_str().map(|version| format!(" {version}"));
        let reason = update["reason"].as_str().map(|reason| format!(": {reason}"));
        lines.push(format!(
            "update {}{label}: {}{}",
            text(&update["id"]),
            text(&update["phase"]),
            version.or(reason).unwrap_or_default(),
        ));
        for node in list(&update["nodes"]) {
            let paused = node["paused_ms"].as_f64();
            let paused = paused.map(|ms| format!(", paused {ms:.1} ms")).unwrap_or_default();
            lines.push(format!("  {}: {}{paused}", text(&node["node"]), text(&node["state"])));
        }
    }
    for node in list(&answer["nodes"]) {
        let [name, role, version] = ["node", "role", "weight_version"].map(|key| text(&node[key]));
        lines.push(format!("{name} ({role}): weights {version}"));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::TcpListener,
    };

    use super::*;

    /// Answers one request on each connection; an empty answer closes the connection. Returns the
    /// URL.
    fn serve(answers: Vec<String>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for answer in answers {
                let (mut connection, _) = listener.accept().unwrap();
                let (mut request, mut part) = (Vec::new(), [0; 4096]);
                while !is_whole(&request) {
                    let count = connection.read(&mut part).unwrap();
                    assert!(count > 0, "the client has closed its connection");
                    request.extend_from_slice(&part[..count]);
                }
                connection.write_all(answer.as_bytes()).unwrap();
            }
        });
        url
    }

    /// Returns whether a request has its headers, and its body if it has one.
    fn is_whole(request: &[u8]) -> bool {
        let text = String::from_utf8_lossy(request).to_lowercase();
        let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
        let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
        body.len() >= length.map_or(0, |length| length.trim().parse().unwrap())
    }

    fn answer(status: &str, body: &Value) -> String {
        let body = body.to_string();
        let length = body.len();
        format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}")
    }

    fn in_phase(phase: &str) -> Value {
        json!({"update": {"id": "07", "phase": phase, "nodes": []}, "nodes": []})
    }

    fn push(to: String) -> Result<String> {
        let push = PushArgs {
            path: "/new".into(),
            label: String::new(),
            model: None,
            transport: "disk".into(),
            node: None,
            in_flight: "recompute".into(),
            timeout: 60,
            admin: WeightsAdminArgs { to, client: ClientArgs::default() },
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(push.run())
    }

    #[test]
    fn push_follows_an_update_over_polls_that_fail() {
        let full = json!({"error": {"message": "the router has too many connections"}});
        let text = push(serve(vec![
            answer("200 OK", &in_phase("preparing")),
            String::new(),
            answer("503 Service Unavailable", &full),
            answer("200 OK", &in_phase("committed")),
        ]));
        let text = text.unwrap();
        assert!(text.contains("update 07: committed") && text.contains("committed in"), "{text}");
        // A rejected update never begins.
        let error = push(serve(vec![answer("409 Conflict", &full)])).unwrap_err().to_string();
        assert!(error.starts_with("409 Conflict"), "{error}");
    }

    #[test]
    fn report_names_update_nodes_and_pauses() {
        let answer = json!({
            "update": {
                "id": "07", "label": "step 100", "phase": "committed", "weight_version": "8f",
                "nodes": [{"node": "decode-0", "state": "committed", "paused_ms": 1.25}],
            },
            "nodes": [{"node": "decode-0", "role": "decode", "weight_version": "8f"}],
        });
        assert_eq!(
            report(&answer),
            "update 07 (step 100): committed 8f\n  decode-0: committed, paused 1.2 ms\ndecode-0 (decode): weights 8f"
        );
        assert_eq!(report(&json!({"update": null, "nodes": []})), "");
    }
}
