//! The commands, requests and links of README.md and docs/ work as written, except for addresses.

use std::{
    collections::BTreeSet,
    net::TcpListener,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use integration_tests::{
    client::Client,
    cluster::{Cluster, ClusterSpec, SECRET, bin_dir, whole_smollm2},
    command::output,
};
use serde_json::{Value, json};

const READY_WITHIN: Duration = Duration::from_secs(60);
/// Time limit for the end of a killed process on a busy machine.
const ENDED_WITHIN: Duration = Duration::from_secs(30);

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn page(name: &str) -> String {
    std::fs::read_to_string(root().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn readme() -> String {
    page("README.md")
}

/// Returns README.md, CONTRIBUTING.md and the pages of docs/ and its folders.
fn pages() -> Vec<String> {
    let mut pages = vec!["README.md".to_owned(), "CONTRIBUTING.md".to_owned()];
    for folder in ["docs", "docs/benchmarks", "docs/operations", "docs/runbooks"] {
        let entries = std::fs::read_dir(root().join(folder)).into_iter().flatten();
        let names = entries.map(|entry| entry.expect("a readable folder").file_name());
        let names = names.map(|name| format!("{folder}/{}", name.display()));
        pages.extend(names.filter(|name| name.ends_with(".md")));
    }
    pages
}

/// A shell and its children: a process group that is killed together.
struct Script(Child);

impl Script {
    fn start(text: &str) -> Result<Self> {
        let child = Command::new("sh")
            .args(["-c", text])
            .current_dir(root())
            .stdin(Stdio::null())
            .process_group(0)
            .spawn()
            .context("cannot run sh")?;
        Ok(Self(child))
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        // The shell is not reaped yet, so its group id is not reused. The shell's built-in `kill`
        // is used, because the program may be missing.
        let kill = format!("kill -s KILL -- -{}", self.0.id());
        let _ = Command::new("sh").args(["-c", &kill]).status();
        let _ = self.0.kill();
        let deadline = Instant::now() + ENDED_WITHIN;
        while matches!(self.0.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Returns distinct free ports: all ports stay bound until the last is chosen.
fn free_ports<const COUNT: usize>() -> Result<[u16; COUNT]> {
    let mut held = Vec::new();
    let mut ports = [0; COUNT];
    for port in &mut ports {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        *port = listener.local_addr()?.port();
        held.push(listener);
    }
    Ok(ports)
}

/// Runs the documented commands with other ports, a secret and one model under both names.
#[tokio::test]
async fn two_models_start_as_documented() -> Result<()> {
    let blocks = fences(&page("docs/operations/start.md"));
    let block =
        blocks.into_iter().find(|(_, text)| text.starts_with("export BATON_CLUSTER_SECRET"));
    let (_, mut text) = block.context("no block starts two models")?;
    text = text.replace("$PWD/target/release", &bin_dir().display().to_string());
    let model = whole_smollm2().display().to_string();
    for shown in ["models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf", "path/to/another"] {
        assert!(text.contains(shown), "{text}");
        text = text.replace(shown, &model);
    }
    let secret = "$(openssl rand -hex 32)";
    assert_eq!(text.matches(secret).count(), 1, "{text}");
    text = text.replace(secret, SECRET);
    let [http_port, ports @ ..] = free_ports::<5>()?;
    // All ports are marked before the first is replaced, because a chosen port may equal a
    // documented one.
    for place in 0..ports.len() {
        let shown = format!(":{}", 50_061 + place);
        assert_eq!(text.matches(&shown).count(), 2, "{shown} in {text}");
        text = text.replace(&shown, &format!(":PORT_{place}"));
    }
    for (place, port) in ports.iter().enumerate() {
        text = text.replace(&format!("PORT_{place}"), &port.to_string());
    }
    let http = format!("127.0.0.1:{http_port}");
    let settings = "export BATON_TELEMETRY_LOG=warn BATON_ROUTER_GRPC=127.0.0.1:0 BATON_ROUTER_ADMIN=127.0.0.1:0 \
         BATON_NODE_KV_MEMORY=64MiB";
    let script = format!("{settings} BATON_ROUTER_HTTP={http}\n{text}");
    let _running = Script::start(&script)?;

    let client = Client::new(format!("http://{http}"));
    let deadline = Instant::now() + READY_WITHIN;
    loop {
        let health = client.get_json("/health").await;
        if let Ok((_, health)) = &health
            && health["prefill_nodes"] == 2
            && health["decode_nodes"] == 2
        {
            break;
        }
        ensure!(Instant::now() < deadline, "{health:?}\n{script}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    for name in ["one", "two"] {
        let body = json!({"model": name, "prompt": "The capital of France is", "max_tokens": 4,
            "temperature": 0});
        let answer = client.post("/v1/completions", &body).await?.json();
        assert_eq!(answer["model"], name, "{answer}");
        let text = answer["choices"][0]["text"].as_str().context("no text")?;
        assert!(text.contains("Paris"), "{answer}");
    }
    Ok(())
}

/// Returns the fenced code blocks: language and text.
fn fences(readme: &str) -> Vec<(String, String)> {
    let mut fences = Vec::new();
    let mut lines = readme.lines();
    while let Some(line) = lines.next() {
        if let Some(language) = line.strip_prefix("```") {
            let text: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
            fences.push((language.to_owned(), text.join("\n")));
        }
    }
    fences
}

/// Returns the text between single backticks, on one line or two.
fn code_spans(readme: &str) -> Vec<String> {
    let outside_fences: Vec<&str> = readme.split("```").step_by(2).collect();
    let text = outside_fences.join("\n");
    text.split('`').skip(1).step_by(2).map(|span| span.replace('\n', " ")).collect()
}

/// Returns the rows of the table under the heading that starts with `a chat with`: fields and
/// status.
fn chat_rows(readme: &str) -> Vec<(Vec<Value>, u16)> {
    let rows = readme.lines().skip_while(|line| !line.starts_with("| a chat with |"));
    let rows = rows.skip(2).take_while(|line| line.starts_with('|'));
    rows.map(|row| {
        let cells: Vec<&str> = row.split(" | ").collect();
        let [fields, gets] = cells[..] else { panic!("{row}") };
        let status = gets.split(':').next().and_then(|status| status.parse().ok());
        let fields = code_spans(fields);
        let objects = fields.iter().map(|fields| serde_json::from_str(&format!("{{{fields}}}")));
        let objects = objects.collect::<Result<_, _>>();
        (objects.unwrap_or_else(|error| panic!("{row}: {error}")), status.expect("a status"))
    })
    .collect()
}

/// Returns PATH with the tools that `make test` installs.
fn search_path() -> String {
    let tools = bin_dir().join("../site-packages/bin");
    let path = std::env::var("PATH").unwrap_or_default();
    format!("{}:{path}", tools.display())
}

fn run(program: &str, args: &[&str]) -> Result<Output> {
    output(Command::new(program).args(args).env("PATH", search_path()))
}

/// Returns the standard output of a successful command.
fn said_by(program: &str, args: &[&str]) -> Result<String> {
    let output = run(program, args)?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {args:?}: {}: {complaint}", output.status);
    Ok(String::from_utf8(output.stdout)?)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_client_of_the_readme_gets_an_answer() -> Result<()> {
    let cluster =
        Cluster::start(ClusterSpec::whole_smollm2().set("BATON_MODEL_NAME", "smollm2-135m"))
            .await?;
    let mut clients = Vec::new();
    for (language, text) in fences(&readme()) {
        let text = text
            .replace("http://127.0.0.1:8000", &cluster.http())
            .replace("http://127.0.0.1:8001", &cluster.grpc());
        let first = text.split_whitespace().next().context("an empty block")?.to_owned();
        let said = match (language.as_str(), first.as_str()) {
            ("python", _) => said_by("python3", &["-c", &text])?,
            ("sh", "curl" | "buf") => said_by("sh", &["-ec", &text])?,
            ("sh", "make") | ("text", _) => continue,
            _ => panic!("no test runs this {language} block:\n{text}"),
        };
        assert!(said.contains("Paris"), "{text}\nsaid\n{said}");
        match first.as_str() {
            "curl" => assert!(said.trim_end().ends_with("data: [DONE]"), "{said}"),
            "buf" => assert!(said.contains("\"finished\""), "{said}"),
            _ => assert_eq!(said, "The capital of France is Paris."),
        }
        clients.push(first);
    }
    assert!(clients.len() >= 2, "{clients:?}");
    cluster.stop()
}

#[tokio::test]
async fn documented_request_limits_hold() -> Result<()> {
    let cluster = Cluster::start(ClusterSpec::whole_smollm2().nodes(0, 1)).await?;
    let client = Client::new(cluster.http());
    let rows = chat_rows(&page("docs/limits.md"));
    assert!(rows.len() >= 5, "{rows:?}");
    for (requests, status) in rows {
        for fields in requests {
            let mut body =
                json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2});
            let fields = fields.as_object().context("fields")?.clone();
            let names: Vec<String> = fields.keys().cloned().collect();
            body.as_object_mut().context("an object")?.extend(fields);
            let answer = client.post("/v1/chat/completions", &body).await?;
            assert_eq!(answer.status, status, "{body}: {}", answer.json());
            if status != 200 {
                let json = answer.json();
                let param = json["error"]["param"].as_str().context("a field is named")?;
                // The error names the field, or a part of it.
                let is_named = param.strip_prefix(names[0].as_str());
                let is_named =
                    is_named.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
                assert!(is_named, "{body}: {param}");
            }
        }
    }
    cluster.stop()
}

#[test]
fn readme_shows_the_output_of_a_run() -> Result<()> {
    let text = fences(&readme()).into_iter().find(|(_, text)| text.starts_with("baton: ready"));
    let (_, shown) = text.context("no output is shown")?;
    let model = whole_smollm2().display().to_string();
    let mut up = Command::new(bin_dir().join("baton"));
    up.args(["up", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--model", &model])
        .args(["--sample", "--once"]);
    let output = output(&mut up)?;
    let (answer, log) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
    let ready = log.lines().find(|line| line.starts_with("baton: ready")).context("not ready")?;
    assert_eq!(without_numbers(&format!("{ready}\n{answer}")), without_numbers(&shown), "{log}");
    Ok(())
}

fn without_numbers(text: &str) -> String {
    let is_of_number = |c: char| c.is_ascii_digit() || c == '.';
    let mut shape = String::new();
    for word in text.trim().split_inclusive(|c: char| !is_of_number(c)) {
        let rest = word.trim_start_matches(is_of_number);
        let is_number = word.starts_with(|c: char| c.is_ascii_digit());
        shape.push_str(if is_number { "#" } else { &word[..word.len() - rest.len()] });
        shape.push_str(rest);
    }
    shape
}

#[test]
fn every_documented_command_has_valid_flags() -> Result<()> {
    let makefile = std::fs::read_to_string(root().join("Makefile"))?;
    let (mut baton, mut make) = (0, 0);
    for name in pages() {
        let text = page(&name);
        let lines = fences(&text)
            .into_iter()
            .flat_map(|(_, text)| text.lines().map(str::to_owned).collect::<Vec<_>>());
        for command in code_spans(&text).into_iter().chain(lines) {
            let command = command.split(" # ").next().unwrap_or_default();
            let words: Vec<&str> = command.split_whitespace().collect();
            match words[..] {
                [program @ ("baton" | "target/release/baton" | "baton-bench"), ref args @ ..] => {
                    let program = program.rsplit('/').next().unwrap_or_default();
                    let program = bin_dir().join(program).display().to_string();
                    // With --help a program checks the flags before it and exits.
                    said_by(&program, &[args, &["--help"]].concat())
                        .with_context(|| format!("{name}: {command}"))?;
                    baton += 1;
                }
                ["make", ref words @ ..] => {
                    for word in words {
                        let variable = word.split_once('=').map(|(variable, _)| variable);
                        let is_known = match variable {
                            Some(variable) => makefile.contains(&format!("$({variable})")),
                            None => makefile.contains(&format!("\n{word}: ")),
                        };
                        assert!(is_known, "{name}: {command}: {word}");
                    }
                    make += 1;
                }
                _ => {}
            }
        }
    }
    assert!(baton >= 10 && make >= 8, "found {baton} commands of baton and {make} of make");
    Ok(())
}

/// Returns the anchors that GitHub gives the headings of a page.
fn anchors(page: &str) -> Vec<String> {
    let outside_fences: Vec<&str> = page.split("```").step_by(2).collect();
    let text = outside_fences.join("\n");
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let titles = headings.map(|heading| heading.trim_start_matches('#').trim().to_lowercase());
    let anchor = |title: String| title.replace(' ', "-").replace(is_dropped_from_anchors, "");
    titles.map(anchor).collect()
}

fn is_dropped_from_anchors(c: char) -> bool {
    !(c.is_alphanumeric() || c == '-' || c == '_')
}

/// Returns the pages of the folders of the code.
fn readmes() -> Vec<String> {
    let mut readmes = Vec::new();
    for parent in [".", "services", "kernels", "kernels/cuda"] {
        for entry in std::fs::read_dir(root().join(parent)).expect("a readable folder") {
            let folder = entry.expect("a readable folder").file_name();
            let readme = format!("{parent}/{}/README.md", folder.display());
            if root().join(&readme).exists() {
                readmes.push(readme);
            }
        }
    }
    readmes
}

#[test]
fn every_link_of_the_pages_leads_to_a_file_and_a_heading() {
    let (mut files, mut headings) = (0, 0);
    for name in pages().into_iter().chain(readmes()) {
        let text = page(&name);
        let folder = root().join(&name).parent().expect("a page lies in a folder").to_owned();
        let links = text.split("](").skip(1);
        let links = links.map(|rest| rest.split(')').next().unwrap_or_default());
        for link in links.filter(|link| !link.contains("://")) {
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { root().join(&name) } else { folder.join(file) };
            assert!(target.exists(), "{name}: {link} is not there");
            files += 1;
            if !anchor.is_empty() {
                let linked = std::fs::read_to_string(&target).expect("a readable page");
                let is_there = anchors(&linked).iter().any(|found| found == anchor);
                assert!(is_there, "{name}: {link} has no such heading");
                headings += 1;
            }
        }
    }
    assert!(files > 200 && headings > 50, "{files} links, {headings} of them to headings");
}

#[test]
fn readme_is_short() {
    let lines = readme().lines().count();
    assert!(lines <= 150, "README.md has {lines} lines; expected at most 150");
}

/// Returns the sources that contain tests, by file.
fn test_sources() -> Vec<String> {
    let mut folders = vec![root().join("integration-tests"), root().join("services")];
    folders.push(root().join("kernels"));
    let mut sources = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("a readable folder") {
            let path = entry.expect("a readable folder").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                sources.push(std::fs::read_to_string(path).expect("a readable file"));
            }
        }
    }
    sources
}

/// Returns the names of the tests that a source gives to a harness: functions with a test attribute
/// that are not ignored, and functions in the lists of crate `test-harness`.
fn tests_of(source: &str) -> BTreeSet<String> {
    let mut tests = BTreeSet::new();
    for list in source.split("tests![").skip(1) {
        let list = list.split(']').next().unwrap_or_default();
        let names = list.split(',').filter_map(|path| path.trim().rsplit("::").next());
        tests.extend(names.map(str::to_owned));
    }
    let (mut is_test, mut is_ignored) = (false, false);
    for line in source.lines().map(str::trim_start) {
        is_test |= line.starts_with("#[test]") || line.starts_with("#[tokio::test");
        is_ignored |= line.starts_with("#[ignore");
        let function = line.trim_start_matches("async ").strip_prefix("fn ");
        if let Some((name, _)) = function.and_then(|function| function.split_once('(')) {
            if is_test && !is_ignored {
                tests.insert(name.to_owned());
            }
            (is_test, is_ignored) = (false, false);
        }
    }
    tests
}

#[test]
fn comments_helpers_and_ignored_functions_are_no_tests() {
    let source = "
        // fn commented() {}
        #[tokio::test(flavor = \"multi_thread\")]
        async fn asynchronous() {}
        fn helper() {}
        #[test]
        #[should_panic]
        fn panics() {}
        #[test]
        #[ignore = \"a child process\"]
        fn child() {}
        fn main() { test_harness::tests![module::listed, other] }";
    let expected = ["asynchronous", "listed", "other", "panics"].map(str::to_owned);
    assert_eq!(tests_of(source), BTreeSet::from(expected));
}

#[test]
fn pages_name_tests_that_run() {
    let sources = test_sources();
    let tests: BTreeSet<String> = sources.iter().flat_map(|source| tests_of(source)).collect();
    for (name, rows_min) in [("docs/failure-contract.md", 25), ("docs/reported-failures.md", 25)] {
        let page = page(name);
        let is_head = |cell: &str| matches!(cell, "tests" | "---");
        let rows = page.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"));
        let last_cells = rows.filter_map(|row| Some((row, row.rsplit_once(" | ")?.1)));
        let rows: Vec<_> = last_cells.filter(|(_, cell)| !is_head(cell)).collect();
        assert!(rows.len() >= rows_min, "{name}: {rows:?}");
        for (row, cell) in rows {
            let named = code_spans(cell);
            assert!(!named.is_empty(), "{name}: no test in {row}");
            for test in named {
                assert!(tests.contains(&test), "{name}: no test {test} runs");
            }
        }
    }
}
