//! `baton bench` and `baton-bench`, run as a user runs them, with the real model and a real
//! cluster.

#[allow(dead_code)]
#[path = "hugging_face/folder.rs"]
mod folder;

use std::{
    path::Path,
    process::{Command, Output},
};

use anyhow::{Context, Result, ensure};
use integration_tests::{
    cluster::{Cluster, ClusterSpec, bin_dir, smollm2, whole_smollm2},
    command::output,
};
use serde_json::{Value, json};

fn bench(args: &[&str]) -> Result<Output> {
    output(Command::new(bin_dir().join("baton")).arg("bench").args(args))
}

/// Returns the table on standard output, and the report in the file that `--json` names.
fn measured(args: &[&str], json: &Path) -> Result<(String, Value)> {
    let json_path = json.display().to_string();
    let output = bench(&[args, &["--json", &json_path]].concat())?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{args:?}: {}: {said}", output.status);
    Ok((String::from_utf8(output.stdout)?, serde_json::from_slice(&std::fs::read(json)?)?))
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is not a number"))
}

#[test]
fn engine_bench_reports_every_batch_size() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let model = whole_smollm2().display().to_string();
    let sizes = ["--prefill-tokens", "48", "--context-tokens", "16", "--decode-tokens", "8"];
    let trace_path = folder.path().join("trace.json");
    let trace = trace_path.display().to_string();
    let args = ["engine", "--model", &model, "--batch", "1,3", "--runs", "3", "--trace", &trace];
    let args = [&args, &sizes[..]];
    let (table, report) = measured(&args.concat(), &folder.path().join("engine.json"))?;

    // The model has 135 million parameters of two bytes.
    assert_eq!(report["weight_bytes"], 269_030_016u64, "{report}");
    assert_eq!(report["dtype"], "bf16");
    for key in ["load_s", "weight_read_gb_per_s", "threads"] {
        assert!(number(&report[key]) > 0.0, "{key} in {report}");
    }
    let rows = report["rows"].as_array().context("no rows")?;
    let found: Vec<_> = rows.iter().map(|row| [&row["what"], &row["batch"]]).collect();
    let what = |what: &str, batch: u32| [json!(what), json!(batch)];
    let wanted = [what("prefill", 1), what("prefill", 3), what("decode", 1), what("decode", 3)];
    assert_eq!(found, wanted.each_ref().map(|[what, batch]| [what, batch]));
    for row in rows {
        let tokens = if row["what"] == "prefill" { 48 } else { 8 };
        assert_eq!(row["tokens_each"], tokens, "{row}");
        let mut all: Vec<f64> =
            row["tokens_per_s_all"].as_array().context("no runs")?.iter().map(number).collect();
        all.sort_by(f64::total_cmp);
        assert!(all.len() == 3 && all[0] > 0.0, "{row}");
        assert_eq!(number(&row["tokens_per_s_median"]), all[1], "{row}");
        let is_bound = row["what"] == "decode" && row["batch"] == 1;
        assert_eq!(is_bound, row["share_of_weight_read"].is_number(), "{row}");
        let line = format!("{:.1}", all[1]);
        assert!(table.contains(&line), "{line} is not in\n{table}");
        if row["what"] == "prefill" {
            let ttft_ms = row["ttft_ms"].as_array().context("no times")?;
            assert!(0.0 < number(&ttft_ms[0]) && number(&ttft_ms[0]) <= number(&ttft_ms[1]));
            assert!(row["decode"].is_null(), "{row}");
        } else {
            check_decode_steps(&row["decode"]);
            let line = format!("{:.3}", number(&row["decode"]["step_ms_median"]));
            assert!(table.contains(&line), "{line} is not in\n{table}");
        }
    }
    check_trace(&serde_json::from_slice(&std::fs::read(trace_path)?)?);
    Ok(())
}

fn check_decode_steps(decode: &Value) {
    for time in ["plan", "launch", "collect", "all"] {
        let ranks = ["p50", "p99"].map(|rank| number(&decode["host_us"][time][rank]));
        assert!(ranks[0] > 0.0 && ranks.is_sorted(), "{time} in {decode}");
    }
    assert!(number(&decode["device_busy_us"]["p50"]) > 0.0, "{decode}");
    let idle = number(&decode["device_idle_share"]);
    assert!((0.0..1.0).contains(&idle), "{decode}");
    // Three runs, each of seven steps after the step that gives the last sequence its first token.
    // A CPU has no CUDA graphs and no measured peak bandwidth.
    let dispatches = json!({"eager": 21, "graph": 0, "fallback": 0, "padding_rows": 0});
    assert_eq!(decode["dispatches"], dispatches);
    assert_eq!((&decode["floor_ms"], &decode["share_of_floor"]), (&Value::Null, &Value::Null));
}

/// Checks a trace as a viewer reads it: named tracks, and sequential events on each track.
fn check_trace(trace: &Value) {
    let events = trace["traceEvents"].as_array().expect("a list of events");
    let track = |event: &Value| event["tid"].as_u64().expect("a track") as usize;
    let mut names = vec![String::new(); 4];
    for event in events.iter().filter(|event| event["name"] == "thread_name") {
        names[track(event)] = event["args"]["name"].as_str().expect("a name").to_owned();
    }
    assert_eq!(names, ["plan", "launch", "collect", "device"]);
    let mut free_from = [0.0; 4];
    let mut of_step = std::collections::BTreeMap::<u64, Vec<usize>>::new();
    for event in events.iter().filter(|event| event["ph"] == "X") {
        let (begin, length) = (number(&event["ts"]), number(&event["dur"]));
        // Times are binary fractions of µs, so the last digits are not exact.
        assert!(begin >= free_from[track(event)] - 1e-3 && length >= 0.0, "{event}");
        free_from[track(event)] = begin + length;
        if let Some(step) = event["args"]["step"].as_u64() {
            of_step.entry(step).or_default().push(track(event));
        }
        if names[track(event)] == "device" {
            let args = &event["args"];
            let (rows, tokens) = (number(&args["rows"]), number(&args["tokens"]));
            assert!((1.0..=3.0).contains(&rows) && tokens >= rows, "{event}");
            assert_eq!(
                (event["name"] == "decode", &args["dispatch"]),
                (rows == tokens, &json!("eager"))
            );
        }
    }
    // Two measurements of two batches and three runs each.
    for phase in ["b", "e"] {
        let of_phase = events.iter().filter(|it| it["ph"] == phase);
        assert_eq!(of_phase.filter(|it| it["cat"] == "measurement").count(), 12);
    }
    // Every batch and run has at least one prefill step and eight decode steps.
    assert!(of_step.len() >= 6 + 6 * 8, "{} steps", of_step.len());
    assert!(of_step.values().all(|tracks| tracks[..] == [0, 1, 2, 3]), "{of_step:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn serve_bench_reports_every_load() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (json_path, svg) = (folder.path().join("serve.json"), folder.path().join("serve.svg"));
    let cluster = Cluster::start(ClusterSpec::smollm2()).await?;
    let url = cluster.http();
    let svg_path = svg.display().to_string();
    let serve = ["serve", "--url", &url, "--requests", "3", "--svg", &svg_path];
    let length = ["--input-tokens", "20..40", "--output-tokens", "6", "--turns", "2"];
    for (flags, loads) in [
        (["--concurrency", "1,2"], &[json!({"concurrency": 1}), json!({"concurrency": 2})][..]),
        (["--rate", "20"], &[json!({"rate": 20.0})]),
    ] {
        let (table, report) = measured(&[&serve[..], &length, &flags].concat(), &json_path)?;
        let points = report["points"].as_array().context("no points")?;
        assert!(points.iter().map(|point| &point["load"]).eq(loads), "{report}");
        points.iter().for_each(check_point);
        assert_eq!(table.matches("6 of 6 requests completed").count(), points.len(), "{table}");
        let chart = std::fs::read_to_string(&svg)?;
        assert!(chart.contains("<svg") && chart.trim_end().ends_with("</svg>"), "{chart}");
    }

    // Sends a trace to the same cluster under two names. Its arrivals take 0.4 s, and 0.2 s at
    // twice the rate.
    let trace = folder.path().join("trace.jsonl");
    let row = |timestamp: u32, input: u32, ids: &str| {
        format!(
            "{{\"timestamp\":{timestamp},\"input_length\":{input},\"output_length\":6,\"hash_ids\":{ids}}}\n"
        )
    };
    let rows =
        [row(0, 600, "[1,2]"), row(100, 9000, "[]"), row(200, 600, "[1,3]"), row(400, 20, "[]")];
    std::fs::write(&trace, rows.concat())?;
    let trace_path = trace.display().to_string();
    let compared = ["--compare", &url, "--trace", &trace_path, "--rate-scale", "1,2"];
    let serve = ["serve", "--url", &url, "--requests", "4", "--svg", &svg_path];
    let (table, report) = measured(&[&serve[..], &compared].concat(), &json_path)?;
    let workload = "trace: 3 requests, input 407 and output 6 tokens on average, \
                    1 longer than the context left out";
    assert_eq!(report["workload"], workload);
    for server in [&report, &report["compared"][0]] {
        assert_eq!(server["url"], url);
        let points = server["points"].as_array().context("no points")?;
        for (point, scale) in points.iter().zip([1.0, 2.0]) {
            assert_eq!(point["load"], json!({"rate_scale": scale}));
            assert_eq!(all_ended_well(point, 3)?, 3);
            assert!(number(&point["elapsed_s"]) >= 0.4 / scale, "{point}");
        }
    }
    let cached = number(&report["compared"][0]["points"][0]["cached_share"]);
    assert!(cached > 0.9, "both servers receive the same prompts: {report}");
    assert_eq!(table.matches("and the ratio to").count(), 2, "{table}");

    // Answers by a schema of one boolean end after a few of the 20 tokens.
    let schema = folder.path().join("schema.json");
    std::fs::write(&schema, r#"{"type": "boolean"}"#)?;
    let schema_path = schema.display().to_string();
    let by_schema = ["serve", "--url", &url, "--requests", "3", "--output-tokens", "20"];
    let (_, report) =
        measured(&[&by_schema[..], &["--schema", &schema_path]].concat(), &json_path)?;
    let point = &report["points"][0];
    all_ended_well(point, 3)?;
    let output_tokens = number(&point["output_token_per_s"]) * number(&point["elapsed_s"]);
    assert!((3.0..30.0).contains(&output_tokens.round()), "{point}");

    // Rejected requests are counted by reason: the model's context is 8,192 tokens.
    let long = ["serve", "--url", &url, "--requests", "3", "--input-tokens", "9000"];
    let output = bench(&long)?;
    assert_eq!(output.status.code(), Some(1));
    let table = String::from_utf8_lossy(&output.stdout);
    let reason = "3 x 400 Bad Request: prompt has 8192 tokens";
    assert!(table.contains("0 of 3 requests completed") && table.contains(reason), "{table}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.ends_with("no request completed\n"), "{said}");
    cluster.stop()
}

/// A shell usually has a soft limit of 1,024 open files, and a much higher hard limit.
#[tokio::test(flavor = "multi_thread")]
async fn serve_bench_raises_its_limit_on_open_files() -> Result<()> {
    let cluster = Cluster::start(ClusterSpec::smollm2()).await?;
    let url = cluster.http();
    let baton = bin_dir().join("baton");
    let bench = |limit: &str| {
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("{limit} && exec \"$0\" \"$@\"")]).arg(&baton);
        shell.args(["bench", "serve", "--url", &url, "--requests", "100", "--concurrency", "100"]);
        shell.args(["--warmup", "0", "--input-tokens", "4", "--output-tokens", "1"]);
        output(&mut shell)
    };
    let soft = bench("ulimit -S -n 64")?;
    let table = String::from_utf8_lossy(&soft.stdout);
    let said = String::from_utf8_lossy(&soft.stderr);
    assert!(table.contains("of 100 requests completed"), "{table}{said}");
    assert!(!table.contains("open files") && !said.contains("open files"), "{table}{said}");

    // A hard limit cannot be raised.
    let hard = bench("ulimit -n 100")?;
    let said = String::from_utf8_lossy(&hard.stderr);
    assert_eq!((hard.status.code(), said.lines().count()), (Some(1), 1), "{said}");
    assert!(said.contains("open files is 100") && said.contains("--concurrency"), "{said}");
    cluster.stop()
}

/// Checks a load point of three conversations with two turns of six output tokens each.
fn check_point(point: &Value) {
    let counted = ["conversations", "conversations_completed", "requests", "completed"];
    assert_eq!(counted.map(|what| number(&point[what])), [3.0, 3.0, 6.0, 6.0], "{point}");
    assert_eq!(point["errors"], json!({}));
    for (what, count) in [
        ("ttft_ms", 6),
        ("tpot_ms", 6),
        ("itl_ms", 30),
        ("e2e_ms", 6),
        ("handover_gap_ms", 6),
        ("conversation_s", 3),
    ] {
        assert_eq!(point[what]["count"], count, "{what} in {point}");
    }
    for what in ["ttft_ms", "e2e_ms", "conversation_s"] {
        let ranks = ["p50", "p90", "p99", "max"].map(|rank| number(&point[what][rank]));
        assert!(ranks[0] > 0.0 && ranks.is_sorted(), "{what} in {point}");
    }
    assert!(number(&point["e2e_ms"]["mean"]) >= number(&point["ttft_ms"]["mean"]), "{point}");
    let elapsed_s = number(&point["elapsed_s"]);
    let count = |per_s: &str| (number(&point[per_s]) * elapsed_s).round();
    assert_eq!((count("request_per_s"), count("output_token_per_s")), (6.0, 36.0), "{point}");
    // The second prompt contains the first prompt and its answer.
    let prompts = |tokens: f64| 3.0 * (tokens + tokens + 6.0 + tokens);
    let all = 36.0 + prompts(20.0)..=36.0 + prompts(40.0);
    assert!(all.contains(&count("total_token_per_s")), "{point}");
    let cached = number(&point["cached_share"]);
    assert!(cached > 0.0 && cached < 0.5, "{point}");
}

/// Returns the number of sent requests. All requests and conversations must have completed.
fn all_ended_well(point: &Value, conversations: u32) -> Result<u64> {
    for what in ["conversations", "conversations_completed"] {
        ensure!(point[what] == conversations, "{what} in {point}");
    }
    ensure!(point["errors"] == json!({}), "{point}");
    let requests = point["requests"].as_u64().context("no count")?;
    ensure!(point["completed"] == requests, "{point}");
    for what in ["ttft_ms", "e2e_ms"] {
        ensure!(point[what]["count"] == requests, "{what} in {point}");
    }
    Ok(requests)
}

/// Returns the number of polylines in a file that must be valid XML.
fn lines_in_xml(path: &Path) -> Result<usize> {
    let read = "import sys, xml.etree.ElementTree as tree
root = tree.parse(sys.argv[1]).getroot()
assert root.tag == '{http://www.w3.org/2000/svg}svg', root.tag
print(len(root.findall('.//{http://www.w3.org/2000/svg}polyline')))";
    let output = output(Command::new("python3").args(["-c", read]).arg(path))?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?.trim().parse()?)
}

#[tokio::test(flavor = "multi_thread")]
async fn serve_bench_checks_goodput_limits_and_draws_charts() -> Result<()> {
    let folder = tempfile::tempdir()?;
    folder::write_tiny_config(folder.path(), 4096)?;
    folder::write_tokenizer(&smollm2(), folder.path())?;
    let spec = ClusterSpec {
        model: folder.path().to_owned(),
        load_format: "dummy",
        ..ClusterSpec::smollm2()
    };
    let cluster = Cluster::start(spec).await?;
    let (url, model) = (cluster.http(), folder.path().display().to_string());
    let (json_path, svg) = (folder.path().join("bench.json"), folder.path().join("bench.svg"));
    let svg_path = svg.display().to_string();
    let serve = |flags: &[&str]| {
        let common = ["serve", "--url", &url, "--svg", &svg_path];
        measured(&[&common[..], flags].concat(), &json_path)
    };

    // Tool-calling jobs at rates that are given.
    let limits = ["--goodput", "ttft:600000,e2e:600000"];
    let (table, report) = serve(&[&["--agents", "--requests", "2"], &limits[..]].concat())?;
    let points = report["points"].as_array().context("no points")?;
    let loads: Vec<Value> = points.iter().map(|point| point["load"]["rate"].clone()).collect();
    assert_eq!(loads, [1.0, 3.0, 6.0, 10.0]);
    for point in points {
        assert_eq!(all_ended_well(point, 2)?, 16, "two jobs of eight turns");
        let elapsed_s = number(&point["elapsed_s"]);
        let tokens = (number(&point["output_token_per_s"]) * elapsed_s).round();
        assert_eq!(tokens, 320.0, "20 tokens a turn: {point}");
        // Seven tool calls of half a second each.
        assert!(number(&point["conversation_s"]["p50"]) >= 3.5, "{point}");
        // Lengths are scaled down, but fill more than half of the model's context.
        let whole = number(&point["total_token_per_s"]) * elapsed_s;
        assert!(whole > 2.0 * 8.0 * 1000.0, "{point}");
        assert_eq!(point["goodput_share"], 1.0, "{point}");
        assert!(number(&point["cached_share"]) > 0.5, "each turn repeats those before: {point}");
    }
    assert!(report["workload"].as_str().is_some_and(|said| said.starts_with("tool-calling jobs")));
    assert_eq!(table.matches("16 of 16 requests completed").count(), 4, "{table}");
    assert_eq!(table.matches("goodput: 100.0 % of the requests").count(), 4, "{table}");
    // Three panels, each with three lines and three legend entries.
    assert!(lines_in_xml(&svg)? >= 18);

    // Conversations with the lengths of ShareGPT, and a limit that no request meets.
    let talks = ["--sharegpt", "--requests", "3", "--concurrency", "3"];
    let (table, report) = serve(&[&talks[..], &["--goodput", "ttft:0.001"]].concat())?;
    let points = report["points"].as_array().context("no points")?;
    assert_eq!(points.len(), 1, "{report}");
    let requests = all_ended_well(&points[0], 3)?;
    assert!((3..=21).contains(&requests), "one to seven turns: {report}");
    assert_eq!(points[0]["goodput_share"], 0.0, "{report}");
    assert_eq!(report["goodput_limits"]["ttft_ms"], 0.001);
    assert!(table.contains("goodput: 0.0 % of the requests, 0.00 requests/s"), "{table}");
    assert!(report["workload"].as_str().is_some_and(|said| said.starts_with("ShareGPT-like")));
    assert!(lines_in_xml(&svg)? >= 18);

    // The server's model name is that of its folder.
    let name = Path::new(&model).file_name().context("a name")?.to_string_lossy();
    assert_eq!(report["model"], *name, "{report}");
    cluster.stop()
}

#[test]
fn invalid_flag_is_rejected_in_one_line() -> Result<()> {
    let model = smollm2().display().to_string();
    let engine = |flags: &[&str]| [&["engine", "--model", &model], flags].concat().join("\t");
    let serve = |flags: &[&str]| [&["serve"], flags].concat().join("\t");
    let nobody = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let away = format!("http://{nobody}");
    for (args, code, words) in [
        (engine(&["--batch", "0"]), 1, &["--batch", "[0]", "1 to 1024"][..]),
        (engine(&["--batch", "1,many"]), 2, &["--batch", "many"]),
        (engine(&["--dtype", "f64"]), 2, &["--dtype", "f64", "f32, bf16, q8 or fp8"]),
        (engine(&["--load-format", "gguf"]), 2, &["--load-format", "gguf", "auto or dummy"]),
        (engine(&["--runs", "0"]), 2, &["--runs", "0", "1..=1000"]),
        (engine(&["--threads", "0"]), 1, &["invalid threads: 0", "1 to 1024"]),
        (engine(&["--context-tokens", "9000"]), 1, &["10430 tokens", "--context-tokens", "8192"]),
        (engine(&["--json", "/nowhere/bench.json"]), 1, &["--json /nowhere/bench.json"]),
        (serve(&["--json", "/nowhere/bench.json"]), 1, &["--json /nowhere/bench.json"]),
        (serve(&["--svg", "/nowhere/bench.svg"]), 1, &["--svg /nowhere/bench.svg"]),
        (engine(&["--requests", "4"]), 2, &["--requests"]),
        ("engine\t--model\tnobody".to_owned(), 1, &["nobody", "smollm2-135m"]),
        (serve(&["--requests", "0"]), 2, &["--requests", "0"]),
        (serve(&["--input-tokens", "9..3"]), 2, &["--input-tokens", "9..3", "LOW <= HIGH"]),
        (serve(&["--output-tokens", "0"]), 2, &["--output-tokens", "\"0\"", "1 to 1000000"]),
        (serve(&["--rate", "0"]), 2, &["--rate", "'0'", "expected 0.000001 to 1000000000"]),
        (serve(&["--rate", "nan"]), 2, &["--rate", "nan", "expected 0.000001"]),
        (serve(&["--rate", "1e-300"]), 2, &["--rate", "1e-300", "expected 0.000001"]),
        (serve(&["--goodput", "itl:5"]), 2, &["--goodput", "itl", "ttft:MS"]),
        (serve(&["--agents", "--turns", "2"]), 2, &["--agents", "--turns"]),
        (serve(&["--rate", "2", "--concurrency", "2"]), 2, &["--rate", "--concurrency"]),
        (serve(&["--trace", "/nowhere/t.csv"]), 1, &["the trace /nowhere/t.csv"]),
        (serve(&["--schema", "/nowhere/s.json"]), 1, &["--schema /nowhere/s.json"]),
        (serve(&["--rate-scale", "2"]), 2, &["required arguments"]),
        (serve(&["--url", "not a url"]), 1, &["not a url"]),
        (serve(&["--url", "ftp://localhost"]), 1, &["ftp://localhost", "expected http://"]),
        (serve(&["--url", &away]), 1, &[&away]),
    ] {
        let args: Vec<&str> = args.split('\t').collect();
        let output = bench(&args)?;
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {said}");
        // The first line is the error; usage text of clap follows.
        let line = said.lines().next().unwrap_or_default();
        for word in words {
            assert!(line.contains(word), "{args:?}: {said:?} lacks {word:?}");
        }
        assert!(code == 2 || said.lines().count() == 1, "{args:?}: {said}");
        assert!(output.stdout.is_empty(), "{args:?}");
    }
    Ok(())
}

/// Without a GPU the KV is in host memory and the transport is tcp.
#[test]
fn transfer_bench_runs_between_two_processes() -> Result<()> {
    let sizes = ["--block-kib", "16", "--blocks", "1,6", "--chunk-blocks", "4", "--rounds", "3"];
    let bench = |args: &[&str]| output(Command::new(bin_dir().join("baton-bench")).args(args));
    let output = bench(&[&["transfer", "--in-flight", "2", "--json"], &sizes[..]].concat())?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {said}", output.status);
    let report: Value = serde_json::from_slice(&output.stdout)?;
    assert_eq!(report["block_bytes"], 16 << 10);
    let rows = report["rows"].as_array().context("no rows")?;
    let found: Vec<_> = rows.iter().map(|row| (&row["transport"], &row["blocks"])).collect();
    assert_eq!(found, [(&json!("tcp"), &json!(1)), (&json!("tcp"), &json!(6))]);
    for row in rows {
        assert_eq!(row["alone_us"]["count"], 3, "{row}");
        assert!(number(&row["together_gb_per_s"]) > 0.0, "{row}");
    }
    for (args, reason) in [
        (&["--gpus", "0"][..], "expected two GPUs"),
        (&["--block-kib", "6"], "a multiple of 4"),
        (&["--blocks", "0"], "1 to 100000"),
    ] {
        let output = bench(&[&["transfer"], args].concat())?;
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(reason), "{args:?}: {said}");
    }
    Ok(())
}
