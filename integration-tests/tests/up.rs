//! `baton up`, run as a user runs it.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    io::Read,
    net::TcpListener,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use integration_tests::{
    client::{Client, Event, greedy_body},
    cluster::{SECRET, Service, bin_dir, whole_smollm2},
    command,
    golden::whole_golden,
    lines::Lines,
    processes::{arguments, signal},
    up::Up,
};
use serde_json::{Value, json};

const DEADLINE: Duration = Duration::from_secs(60);
/// Default name of the model that [`start`] serves: that of its file.
const MODEL_NAME: &str = "SmolLM2-135M-Instruct.Q4_1";

/// Starts `baton up` with the real model on free ports.
fn start(args: &[&str]) -> Result<Up> {
    start_with(args, &BTreeMap::new())
}

/// Starts `baton up` as [`start`] does, with these variables.
fn start_with(args: &[&str], settings: &BTreeMap<String, String>) -> Result<Up> {
    let model = whole_smollm2().display().to_string();
    let common = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--model", &model];
    Up::start(&[&common, args].concat(), settings)
}

/// Kills the child that runs this program.
fn kill_child(up: &Up, program: &str) -> Result<()> {
    let children = up.children();
    let is_it = |id: &&u32| arguments(**id).first().is_some_and(|name| name.ends_with(program));
    let victim = children.iter().find(is_it);
    signal(*victim.with_context(|| format!("no {program} in {children:?}"))?, "KILL");
    Ok(())
}

#[test]
fn cpus_for_several_nodes_are_refused_in_one_line() -> Result<()> {
    for (key, value) in [("node.cpus", "0"), ("node.numa_node", "0")] {
        let variable = format!("BATON_{}", key.replace('.', "_").to_uppercase());
        let output = command::output(
            Command::new(bin_dir().join("baton"))
                .args(["up", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--model"])
                .arg(whole_smollm2())
                .env(&variable, value),
        )?;
        let said = String::from_utf8(output.stderr)?;
        assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{said}");
        for word in [key, &variable, "all 2 nodes"] {
            assert!(said.contains(word), "{said:?} lacks {word:?}");
        }
    }
    Ok(())
}

#[test]
fn alias_of_an_unknown_model_is_refused_before_any_node_starts() -> Result<()> {
    let mut command = Command::new(bin_dir().join("baton"));
    command.args(["up", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--model"]);
    let output = command::output(command.arg(whole_smollm2()).env("BATON_ROUTER_ALIASES", "a=b"))?;
    let said = String::from_utf8(output.stderr)?;
    assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{said}");
    assert!(said.contains(&format!("there is no model \"b\"; allowed: {MODEL_NAME}")), "{said}");
    Ok(())
}

#[test]
fn once_prints_an_answer_with_statistics_and_stops_cleanly() -> Result<()> {
    let mut up = start(&["--sample", "--once"])?;
    let mut answer = String::new();
    up.child.stdout.take().expect("stdout is piped").read_to_string(&mut answer)?;
    assert_eq!(up.wait()?, Some(0), "{answer}");
    for words in ["Paris", "time to first token", "tokens/s", "of KV moved", "decoded by decode-0"]
    {
        assert!(answer.contains(words), "{answer:?} lacks {words:?}");
    }
    Ok(())
}

#[test]
fn check_gets_answers_over_http_and_grpc() -> Result<()> {
    let mut up = start(&[])?;
    let ready = up.lines.wait_for("baton: ready")?;
    let word_after = |name: &str| ready.split_whitespace().skip_while(move |w| *w != name).nth(1);
    let url = word_after("API").context("no URL")?.trim_end_matches("/v1");
    let grpc = word_after("gRPC").context("no gRPC address")?;
    let check = |grpc: &str| {
        let mut command = Command::new(bin_dir().join("baton"));
        command::output(command.args(["check", url, "--grpc", grpc, "--prefill", MODEL_NAME]))
    };
    let output = check(grpc)?;
    let said = String::from_utf8(output.stdout)?;
    assert!(output.status.success(), "{said}");
    for words in
        ["decoded by decode-0", "gRPC: 8 tokens", "metrics: ", "prefilled by prefill-0, decoded"]
    {
        assert!(said.contains(words), "{said:?} lacks {words:?}");
    }
    let output = check("127.0.0.1:1")?;
    let said = String::from_utf8(output.stderr)?;
    assert!(
        !output.status.success() && said.contains("127.0.0.1:1: no answer over gRPC"),
        "{said}"
    );
    Ok(())
}

#[test]
fn check_fails_if_no_prefill_node_prefills() -> Result<()> {
    let mut up = start(&["--prefill", "0"])?;
    let ready = up.lines.wait_for("baton: ready")?;
    let url = ready.split_once("API ").context("no URL")?.1.split("/v1").next().context("URL")?;
    let mut command = Command::new(bin_dir().join("baton"));
    let output = command::output(command.args(["check", url, "--prefill", MODEL_NAME]))?;
    let said = String::from_utf8(output.stderr)?;
    assert!(
        !output.status.success() && said.contains("decode nodes prefilled 8 of 8 prompts"),
        "{said}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn requested_node_counts_and_dtype_are_used() -> Result<()> {
    let alias = format!("latest={MODEL_NAME}");
    let args = ["--prefill", "2", "--decode", "2", "--dtype", "f32"];
    let mut up = start_with(&args, &BTreeMap::from([("BATON_ROUTER_ALIASES".to_owned(), alias)]))?;
    let client = up.client()?;
    assert_eq!(client.get_json("/v1/models/latest").await?.1["root"], MODEL_NAME);
    let loaded = up.lines.seen().iter().filter(|line| line.contains("loaded the weights"));
    let formats: Vec<bool> = loaded.map(|line| line.contains("dtype=f32")).collect();
    assert_eq!(formats, [true; 4], "{:#?}", up.lines.seen());
    let (_, health) = client.get_json("/health").await?;
    assert_eq!((&health["prefill_nodes"], &health["decode_nodes"]), (&json!(2), &json!(2)));
    // The golden tokens are from f32; with bf16 the answer would differ.
    let run = whole_golden().longest();
    assert_eq!(client.greedy(&run.prompt_ids, 48).await?, run.output_ids);
    up.interrupt();
    assert_eq!(up.wait()?, Some(0));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn explained_stages_account_for_95_percent_of_a_request() -> Result<()> {
    let mut up = start(&[])?;
    let client = up.client()?;
    // Nodes without measured steps hand over on any machine.
    let labels = ["explained", "second", "third", "fourth", "fifth"];
    for (label, first) in labels.into_iter().zip([1000_u32, 2000, 3000, 4000, 5000]) {
        let prompt: Vec<u32> = (first..first + 200).collect();
        let body =
            json!({"prompt": prompt, "max_tokens": 64, "ignore_eos": true, "temperature": 0});
        let label = [("x-request-id", label)];
        let answer = client.post_bytes("/v1/completions", body.to_string().into(), &label).await?;
        assert_eq!(answer.status, 200);
    }
    let ready = up.lines.seen().iter().find(|line| line.contains("baton: ready"));
    let ready = ready.context("ready")?;
    let admin = ready.split_once("admin ").context("no admin URL")?.1.trim().to_owned();
    let (_, explained) = Client::new(admin.clone()).get_json("/v1/explain/explained").await?;
    let request = &explained["requests"][0];
    assert_eq!(request["attempts"][0]["disaggregated"], true, "{request:#}");
    for stage in request["stages"].as_array().context("no stages")? {
        assert!(stage["ms"].is_number(), "{stage} of {request:#}");
    }
    // The median: one delayed thread of a busy machine is much of a request.
    let mut unaccounted = Vec::new();
    for label in labels {
        let (_, explained) =
            Client::new(admin.clone()).get_json(&format!("/v1/explain/{label}")).await?;
        let ms = |field: &str| explained["requests"][0][field].as_f64().context("no number");
        unaccounted.push(ms("unaccounted_ms")? / ms("duration_ms")?);
    }
    unaccounted.sort_by(f64::total_cmp);
    assert!(unaccounted[2] <= 0.05, "{unaccounted:?}");

    let explain = |id: &str, from: &[&str]| {
        let mut command = Command::new(bin_dir().join("baton"));
        command::output(command.args(["explain", id]).args(from))
    };
    let by_url = ["--url", &admin];
    let printed = String::from_utf8(explain("explained", &by_url)?.stdout)?;
    for words in ["label explained", "disaggregated: ", "*prefill-0 to decode-0", "hand-over"] {
        assert!(printed.contains(words), "{printed:?} lacks {words:?}");
    }
    let unknown = explain("nobody", &by_url)?;
    let said = String::from_utf8(unknown.stderr)?;
    assert_eq!(unknown.status.code(), Some(1), "{said}");
    assert!(said.contains("\"nobody\"") && said.contains("the last 5 that ended"), "{said}");

    up.lines.wait_for("request ended")?;
    let folder = tempfile::tempdir()?;
    let log = folder.path().join("up.log");
    std::fs::write(&log, up.lines.seen().join("\n"))?;
    let log = log.display().to_string();
    let printed = String::from_utf8(explain("explained", &["--log", &log])?.stdout)?;
    for words in ["request ended\n", "    prefill_node prefill-0\n", "    label explained\n"] {
        assert!(printed.contains(words), "{printed:?} lacks {words:?}");
    }
    Ok(())
}

/// The output is not read, as with a paused terminal. A pipe holds 64 KiB.
#[test]
fn unread_log_does_not_delay_the_shutdown() -> Result<()> {
    let model = whole_smollm2().display().to_string();
    let mut child = Command::new(bin_dir().join("baton"))
        .args(["up", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--model", &model])
        .args(["--sample"])
        .env("BATON_TELEMETRY_LOG", "trace")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut answer = Lines::of(child.stdout.take().context("stdout is piped")?);
    let unread = child.stderr.take().context("stderr is piped")?;
    // By now the log exceeds the pipe's capacity, and the cluster still serves.
    answer.wait_for("time to first token")?;
    let mut up = Up {
        child: test_harness::KilledOnDrop(child),
        lines: Lines::of(std::io::empty()),
        folder: None,
    };
    up.interrupt();
    assert_eq!(up.wait()?, Some(0));
    drop(unread);
    Ok(())
}

/// Runs `make run` with the binaries already built.
#[test]
fn make_run_once_streams_an_answer_and_ends() -> Result<()> {
    let built = bin_dir();
    let (target, profile) = (built.parent(), built.file_name().and_then(OsStr::to_str));
    let mut make = Command::new("make")
        .args(["run", "ONCE=1", "CARGO=true", "HTTP=127.0.0.1:0", "GRPC=127.0.0.1:0"])
        .arg(format!("PROFILE={}", profile.context("a profile")?))
        .arg(format!("MODEL={}", whole_smollm2().display()))
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."))
        .env("CARGO_TARGET_DIR", target.context("a target folder")?)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot run make")?;
    let log = Lines::of(make.stderr.take().expect("stderr is piped"));
    let mut answer = Lines::of(make.stdout.take().expect("stdout is piped"));
    let mut make = Up { child: test_harness::KilledOnDrop(make), lines: log, folder: None };
    assert_eq!(make.wait()?, Some(0), "{:#?}", make.lines.all());
    let answer = answer.all().join("\n");
    for words in ["Paris", "tokens/s", "of KV moved"] {
        assert!(answer.contains(words), "{answer:?} lacks {words:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_child_is_restarted_and_an_interrupt_stops_all_processes() -> Result<()> {
    let mut up = start(&["--decode", "2"])?;
    let client = up.client()?;
    let body = json!({"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0});
    assert_eq!(client.post("/v1/completions", &body).await?.status, 200);

    assert_eq!(up.children().len(), 4);
    kill_child(&up, "baton-decode-node")?;
    up.lines.wait_for("; restarting")?;
    assert_eq!(client.post("/v1/completions", &body).await?.status, 200);
    wait_decode_nodes(&client, 2).await?;

    let children = up.children();
    up.interrupt();
    assert_eq!(up.wait()?, Some(0));
    for id in children {
        assert!(!Path::new(&format!("/proc/{id}")).exists(), "{id} is left behind");
    }
    Ok(())
}

async fn wait_decode_nodes(client: &Client, count: u32) -> Result<()> {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let health = client.get_json("/health").await;
        if health.as_ref().is_ok_and(|(_, health)| health["decode_nodes"] == count) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "the cluster does not come back: {health:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_router_is_reported_and_restarted_at_its_address() -> Result<()> {
    let mut up = start(&[])?;
    let client = up.client()?;
    kill_child(&up, "baton-router")?;
    let line = up.lines.wait_for("; restarting")?;
    assert!(line.starts_with("baton: router exited with signal: 9"), "{line}");
    wait_decode_nodes(&client, 1).await?;
    let body = json!({"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0});
    let answer = client.post("/v1/completions", &body).await?;
    assert_eq!(answer.status, 200, "{:?}", answer.json());
    up.interrupt();
    assert_eq!(up.wait()?, Some(0));
    Ok(())
}

/// Returns the first of two free ports that follow each other.
fn two_free_ports() -> Result<u16> {
    for _ in 0..100 {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let port = listener.local_addr()?.port();
        if port < u16::MAX && TcpListener::bind(("127.0.0.1", port + 1)).is_ok() {
            return Ok(port);
        }
    }
    bail!("no two free ports that follow each other")
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_of_one_host_serve_a_router_that_runs_elsewhere() -> Result<()> {
    let (port, model) = (two_free_ports()?, whole_smollm2().display().to_string());
    let settings = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    };
    let host = settings(&[
        ("BATON_CLUSTER_SECRET", SECRET),
        ("BATON_NODE_GRPC", &format!("127.0.0.1:{port}")),
        ("BATON_NODE_ID", "host-a"),
    ]);
    let args = ["--no-router", "--health", "127.0.0.1:0", "--model", &model, "--dtype", "f32"];
    let mut up = Up::start(&args, &host)?;
    let ready = up.lines.wait_for("baton: ready")?;
    let health = ready.split_whitespace().last().context("no address of health")?;
    let health = Client::new(health.to_owned());
    let status = async |path: &str| anyhow::Ok(health.get(path).await?.status.as_u16());
    assert_eq!((status("/ready").await?, status("/live").await?), (200, 200));
    assert_eq!(up.children().len(), 2);
    for node in up.children() {
        let environment = String::from_utf8(std::fs::read(format!("/proc/{node}/environ"))?)?;
        let share = "BATON_NODE_NODES_PER_CONTAINER=2";
        assert!(environment.split('\0').any(|variable| variable == share), "{environment:?}");
    }

    let folder = tempfile::tempdir()?;
    let router = settings(&[
        ("BATON_MODEL_PATH", &model),
        ("BATON_ROUTER_HTTP", "127.0.0.1:0"),
        ("BATON_ROUTER_GRPC", "127.0.0.1:0"),
        ("BATON_ROUTER_ADMIN", "127.0.0.1:0"),
        ("BATON_ROUTER_DISAGGREGATE", "always"),
        ("BATON_CLUSTER_PREFILL", &format!("dns:localhost:{port}")),
        ("BATON_CLUSTER_DECODE", &format!("dns:localhost:{}", port + 1)),
    ]);
    let router = Service::start(folder.path(), "router", "baton-router", &router)?;
    let client = Client::new(format!("http://{}", router.ready.http));
    wait_decode_nodes(&client, 1).await?;
    let run = whole_golden().longest();
    let body = json!({"prompt": run.prompt_ids, "max_tokens": 8, "temperature": 0}).to_string();
    let ask = async || {
        client.post_bytes("/v1/completions", body.clone().into(), &[("x-baton-stats", "1")]).await
    };
    let stats = ask().await?.json()["baton"].clone();
    assert_eq!(stats["prefill_node"], "host-a-prefill-0", "{stats}");
    assert_eq!(stats["decode_node"], "host-a-decode-0", "{stats}");

    kill_child(&up, "baton-decode-node")?;
    up.lines.wait_for("; restarting")?;
    assert_eq!((status("/ready").await?, status("/live").await?), (200, 200));
    assert_eq!(ask().await?.status, 200);

    // Unready at once, live until the in-flight request has finished.
    let mut stream = client.stream("/v1/completions", &greedy_body(&run.prompt_ids, 48)).await?;
    let mut tokens = stream.next().await?.context("no token")?.token_ids();
    signal(up.child.id(), "TERM");
    let deadline = Instant::now() + DEADLINE;
    while status("/ready").await? == 200 {
        ensure!(Instant::now() < deadline, "still ready");
    }
    assert_eq!(status("/live").await?, 200);
    tokens.extend(stream.all().await?.iter().flat_map(Event::token_ids));
    assert_eq!(tokens, run.output_ids[..48]);
    assert_eq!(up.wait()?, Some(0));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn configuration_file_is_applied() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("baton.toml");
    let model = format!("path = {:?}\nname = \"capitals\"", whole_smollm2());
    let router = "http = \"127.0.0.1:0\"\ngrpc = \"127.0.0.1:0\"";
    let text = format!(
        "[model]\n{model}\n[router]\n{router}\n[node]\nsequence_tokens_max = 64\n\
         [telemetry]\nlog_format = \"json\"\n"
    );
    std::fs::write(&path, text)?;
    let config = path.display().to_string();
    let mut up = Up::start(&["--config", &config], &BTreeMap::new())?;
    let client = up.client()?;
    let (_, models) = client.get_json("/v1/models").await?;
    assert_eq!(models["data"][0]["id"], "capitals", "{models}");
    let body = json!({"prompt": "The capital of France is", "max_tokens": 100});
    let answer = client.post("/v1/completions", &body).await?.json();
    let message = answer["error"]["message"].as_str().unwrap_or_default();
    assert!(message.contains("max_tokens is 100") && message.contains("64"), "{answer}");
    let seen = up.lines.seen();
    for name in ["prefill-0", "decode-0", "router"] {
        let lines = seen.iter().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        assert!(lines.into_iter().any(|line| line["process"] == name), "{seen:#?}");
    }
    up.interrupt();
    assert_eq!(up.wait()?, Some(0));

    std::fs::write(&path, "[router]\nhttps = \"127.0.0.1:0\"\n")?;
    let mut up = Up::start(&["--config", &config], &BTreeMap::new())?;
    assert_eq!(up.wait()?, Some(1));
    let said = up.lines.all();
    assert_eq!(said.len(), 1, "{said:?}");
    for words in ["baton: ", &config, "router.https", "router.http"] {
        assert!(said[0].contains(words), "{said:?} lacks {words}");
    }
    Ok(())
}

#[test]
fn killed_baton_up_leaves_no_child_running() -> Result<()> {
    let mut up = start(&[])?;
    up.client()?;
    let children = up.children();
    assert_eq!(children.len(), 3);
    up.child.kill()?;
    up.child.wait()?;
    let deadline = Instant::now() + DEADLINE;
    for id in children {
        while std::path::Path::new(&format!("/proc/{id}")).exists() {
            ensure!(Instant::now() < deadline, "{id} is left behind");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    Ok(())
}

#[test]
fn invalid_model_or_used_port_is_reported_in_one_line() -> Result<()> {
    let run = |args: &[&str]| -> Result<(Option<i32>, String)> {
        let output = command::output(Command::new(bin_dir().join("baton")).arg("up").args(args))?;
        Ok((output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned()))
    };
    let (code, said) = run(&["--model", "nobody"])?;
    assert_eq!(code, Some(1));
    assert!(said.contains("nobody") && said.contains("smollm2-135m"), "{said}");

    let model = whole_smollm2().display().to_string();
    let (code, said) = run(&["--model", &model, "--no-router"])?;
    assert_eq!((code, said.lines().count()), (Some(1), 1), "{said}");
    assert!(said.contains("cluster.secret"), "{said}");

    let taken = TcpListener::bind("127.0.0.1:0")?;
    let address = taken.local_addr()?.to_string();
    let (code, said) = run(&["--model", &model, "--http", &address])?;
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains(&address), "{said}");

    // The nodes do not load for a router that cannot listen.
    let output = command::output(
        Command::new(bin_dir().join("baton"))
            .args(["up", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--model", &model])
            .env("BATON_ROUTER_ADMIN", &address),
    )?;
    let said = String::from_utf8(output.stderr)?;
    assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{said}");
    assert!(said.contains(&address) && said.contains("router.admin"), "{said}");
    Ok(())
}
