//! Models named by their hub id: downloaded by the real program from a test server, and served.

mod server;

use std::{
    collections::BTreeMap,
    io::ErrorKind,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::Arc,
    time::Duration,
};

use anyhow::{Result, ensure};
use integration_tests::{
    client::Client,
    cluster::{Cluster, ClusterSpec, bin_dir, smollm2, whole_smollm2},
    command,
    golden::golden,
    processes::signal,
    up::Up,
};
use ring::digest::{SHA256, digest};

use self::server::{Behaviour, COMMIT, Content, Hub, MODEL};

const LARGE_BYTES: usize = 300_000;
const WEIGHTS: &str = "model.safetensors";

fn sha256(bytes: &[u8]) -> String {
    digest(&SHA256, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn large(seed: u8) -> Content {
    let bytes: Vec<u8> = (0..LARGE_BYTES).map(|at| (at / 251) as u8 ^ at as u8 ^ seed).collect();
    let tag = sha256(&bytes);
    Content::Large(Arc::new(bytes), tag)
}

/// Returns a model with the additional files that hubs usually have.
fn tiny() -> Behaviour {
    let plain = |text: &str| Content::Plain(text.into());
    let files = [
        ("README.md", plain("# tiny")),
        ("config.json", plain("{\"model_type\": \"llama\"}")),
        ("generation_config.json", plain("{\"top_k\": 5}")),
        (WEIGHTS, large(1)),
        ("pytorch_model.bin", large(2)),
        ("q4/tiny-Q4_0.gguf", large(3)),
        ("tokenizer.json", plain("{\"version\": \"1.0\"}")),
        ("tokenizer_config.json", plain("{\"bos_token\": \"<s>\"}")),
    ];
    let files = files.into_iter().map(|(name, content)| (name.to_owned(), content)).collect();
    Behaviour { files, ..Behaviour::default() }
}

/// A user's machine: a Hugging Face cache folder and the program.
struct Machine {
    home: tempfile::TempDir,
    variables: BTreeMap<String, String>,
}

impl Machine {
    fn new(hub: &Hub) -> Result<Self> {
        let home = tempfile::tempdir()?;
        let variables = [
            ("HF_HOME", home.path().display().to_string()),
            ("HF_ENDPOINT", hub.endpoint()),
            ("NO_PROXY", "127.0.0.1".to_owned()),
        ];
        let variables = variables.map(|(name, value)| (name.to_owned(), value)).into();
        Ok(Self { home, variables })
    }

    fn with(mut self, name: &str, value: &str) -> Self {
        self.variables.insert(name.to_owned(), value.to_owned());
        self
    }

    fn run(&self, args: &[&str]) -> Result<Output> {
        let mut command = Command::new(bin_dir().join("baton"));
        for name in ["HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE"] {
            command.env_remove(name);
        }
        command::output(command.args(["model", "fetch"]).args(args).envs(&self.variables))
    }

    /// Returns the path that a successful fetch prints.
    fn fetch(&self, args: &[&str]) -> Result<PathBuf> {
        let output = self.run(args)?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{said}");
        Ok(String::from_utf8(output.stdout)?.trim().into())
    }

    /// Returns the error output of a failed fetch.
    fn refused(&self, args: &[&str]) -> Result<String> {
        let output = self.run(args)?;
        ensure!(!output.status.success(), "the model was fetched");
        Ok(String::from_utf8(output.stderr)?)
    }

    fn cache(&self) -> PathBuf {
        self.home.path().join("hub").join("models--acme--tiny")
    }
}

fn names(folder: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

const NEEDED: [&str; 5] =
    ["config.json", "generation_config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json"];

#[test]
fn only_needed_files_are_downloaded_and_only_once() -> Result<()> {
    let hub = Hub::start(tiny())?;
    let machine = Machine::new(&hub)?;
    let path = machine.fetch(&["hf:acme/tiny"])?;
    assert_eq!(path, machine.cache().join("snapshots").join(COMMIT));
    assert_eq!(names(&path)?, NEEDED);
    assert_eq!(sha256(&std::fs::read(path.join(WEIGHTS))?), {
        let Content::Large(_, tag) = large(1) else { unreachable!() };
        tag
    });
    assert_eq!(std::fs::read_to_string(machine.cache().join("refs").join("main"))?, COMMIT);
    let asked = hub.take_asked();
    assert!(asked.iter().any(|asked| asked.path.ends_with(WEIGHTS)), "{asked:?}");
    for other in ["README", "pytorch", "gguf"] {
        assert!(asked.iter().all(|asked| !asked.path.contains(other)), "{other}: {asked:?}");
    }

    // The second fetch only resolves the revision; offline it sends no request.
    assert_eq!(machine.fetch(&["hf:acme/tiny"])?, path);
    let asked = hub.take_asked();
    assert_eq!(asked.len(), 1, "{asked:?}");
    let offline = machine.with("HF_HUB_OFFLINE", "1");
    assert_eq!(offline.fetch(&["hf:acme/tiny"])?, path);
    assert!(hub.take_asked().is_empty());
    Ok(())
}

#[test]
fn a_router_fetches_no_weights() -> Result<()> {
    let hub = Hub::start(tiny())?;
    let machine = Machine::new(&hub)?;
    let path = machine.fetch(&["--text-only", "hf:acme/tiny@v1"])?;
    assert_eq!(names(&path)?, NEEDED.into_iter().filter(|n| *n != WEIGHTS).collect::<Vec<_>>());
    // The node downloads the weights when it needs them.
    assert_eq!(names(&machine.fetch(&["hf:acme/tiny@v1"])?)?, NEEDED);
    Ok(())
}

#[test]
fn one_gguf_file_is_fetched_alone() -> Result<()> {
    let hub = Hub::start(tiny())?;
    let machine = Machine::new(&hub)?;
    let path = machine.fetch(&["hf:acme/tiny/q4/tiny-Q4_0.gguf"])?;
    assert!(path.ends_with("q4/tiny-Q4_0.gguf"), "{}", path.display());
    assert_eq!(std::fs::read(&path)?.len(), LARGE_BYTES);
    assert_eq!(names(&machine.cache().join("snapshots").join(COMMIT))?, ["q4"]);
    Ok(())
}

#[test]
fn interrupted_download_resumes_where_it_stopped() -> Result<()> {
    let kept = 123_457;
    let cut_once = [(WEIGHTS.to_owned(), kept)].into();
    let hub = Hub::start(Behaviour { cut_once, ..tiny() })?;
    let machine = Machine::new(&hub)?;
    let path = machine.fetch(&["hf:acme/tiny"])?;
    let Content::Large(bytes, _) = large(1) else { unreachable!() };
    assert!(std::fs::read(path.join(WEIGHTS))? == *bytes, "other bytes");
    let stored = hub.take_asked().into_iter();
    let stored = stored.filter(|asked| asked.path.starts_with("/stored/") && asked.wants_content());
    let ranges: Vec<String> = stored.filter_map(|asked| asked.range).collect();
    assert_eq!(ranges, ["bytes=0-".to_owned(), format!("bytes={kept}-")]);
    Ok(())
}

#[test]
fn corrupt_download_is_rejected_and_deleted() -> Result<()> {
    let damaged = [WEIGHTS.to_owned()].into();
    let hub = Hub::start(Behaviour { damaged, ..tiny() })?;
    let machine = Machine::new(&hub)?;
    let said = machine.refused(&["hf:acme/tiny"])?;
    assert!(said.contains("damaged") && said.contains(WEIGHTS), "{said}");
    let snapshot = machine.cache().join("snapshots").join(COMMIT);
    assert!(!names(&snapshot)?.contains(&WEIGHTS.to_owned()));
    // An incomplete model is not used.
    let offline = machine.with("HF_HUB_OFFLINE", "1");
    let said = offline.refused(&["hf:acme/tiny"])?;
    assert!(said.contains("HF_HUB_OFFLINE"), "{said}");
    Ok(())
}

/// A file has its place in the cache before its verification ends.
#[test]
fn interrupted_verification_is_repeated() -> Result<()> {
    let hub = Hub::start(tiny())?;
    let machine = Machine::new(&hub)?;
    let path = machine.fetch(&["hf:acme/tiny"])?;
    let Content::Large(bytes, tag) = large(1) else { unreachable!() };
    let blob = machine.cache().join("blobs").join(tag);
    let mark = blob.with_extension("unverified");
    assert!(blob.is_file() && !mark.exists());
    let stored = |hub: &Hub| {
        let asked = hub.take_asked().into_iter();
        asked.filter(|asked| asked.path.starts_with("/stored/") && asked.wants_content()).count()
    };
    stored(&hub);

    // A kill leaves the file, its mark and no revision. A commit needs no revision.
    let interrupt = || -> Result<()> {
        std::fs::write(&mark, "")?;
        Ok(std::fs::remove_file(machine.cache().join("refs").join("main"))?)
    };
    interrupt()?;
    let by_commit = format!("hf:acme/tiny@{COMMIT}");
    let offline = Machine { variables: machine.variables.clone(), home: tempfile::tempdir()? };
    let said = offline.with("HF_HUB_OFFLINE", "1").refused(&[&by_commit])?;
    assert!(said.contains("HF_HUB_OFFLINE"), "{said}");
    assert_eq!(machine.fetch(&[&by_commit])?, path);
    assert!(!mark.exists());
    assert_eq!(stored(&hub), 0, "an intact file is not downloaded again");

    machine.fetch(&["hf:acme/tiny"])?;
    interrupt()?;
    std::fs::write(&blob, "damaged")?;
    let said = machine.refused(&["hf:acme/tiny"])?;
    assert!(said.contains("damaged") && said.contains(WEIGHTS), "{said}");
    assert_eq!(machine.fetch(&["hf:acme/tiny"])?, path);
    assert!(std::fs::read(path.join(WEIGHTS))? == *bytes, "other bytes");
    assert!(!mark.exists());
    Ok(())
}

#[test]
fn file_is_marked_as_unverified_before_its_download() -> Result<()> {
    let hub = Hub::start(tiny())?;
    let machine = Machine::new(&hub)?;
    let Content::Large(_, tag) = large(1) else { unreachable!() };
    // The mark cannot be written where a folder has its name.
    let mark = machine.cache().join("blobs").join(tag).with_extension("unverified");
    std::fs::create_dir_all(&mark)?;
    let said = machine.refused(&["hf:acme/tiny"])?;
    assert!(said.contains("cannot create") && said.contains(".unverified"), "{said}");
    let asked = hub.take_asked();
    let is_download = |path: &str| path.starts_with("/stored/") && path.ends_with(WEIGHTS);
    assert!(!asked.iter().any(|it| is_download(&it.path) && it.wants_content()), "{asked:?}");
    Ok(())
}

#[test]
fn failed_download_does_not_hide_a_file_that_another_program_completes() -> Result<()> {
    let file = "q4/tiny-Q4_0.gguf";
    let without_content = [file.to_owned()].into();
    let hub = Hub::start(Behaviour { without_content, ..tiny() })?;
    let machine = Machine::new(&hub)?;
    let model = format!("hf:acme/tiny@{COMMIT}/{file}");
    let said = machine.refused(&[&model])?;
    assert!(said.contains("404") && said.contains(file), "{said}");

    let Content::Large(bytes, tag) = large(3) else { unreachable!() };
    let blob = machine.cache().join("blobs").join(tag);
    std::fs::write(&blob, &*bytes)?;
    let snapshot = machine.cache().join("snapshots").join(COMMIT);
    std::fs::create_dir_all(snapshot.join("q4"))?;
    std::os::unix::fs::symlink(&blob, snapshot.join(file))?;
    let offline = machine.with("HF_HUB_OFFLINE", "1");
    assert_eq!(offline.fetch(&[&model])?, snapshot.join(file));
    Ok(())
}

#[test]
fn gated_model_without_a_token_is_reported() -> Result<()> {
    let token = Some("hf_right".to_owned());
    let hub = Hub::start(Behaviour { token, ..tiny() })?;
    let machine = Machine::new(&hub)?;
    let said = machine.refused(&["hf:acme/tiny"])?;
    assert!(said.contains("401") && said.contains("set HF_TOKEN"), "{said}");
    let machine = machine.with("HF_TOKEN", "hf_wrong");
    let said = machine.refused(&["hf:acme/tiny"])?;
    assert!(said.contains("403") && said.contains("HF_TOKEN"), "{said}");
    assert!(!said.contains("hf_wrong"), "{said}");
    let machine = machine.with("HF_TOKEN", "hf_right");
    assert_eq!(names(&machine.fetch(&["hf:acme/tiny"])?)?, NEEDED);

    // Files cached by the hub's own tools are used.
    let other = Machine::new(&hub)?;
    std::fs::write(other.home.path().join("token"), "hf_right\n")?;
    assert_eq!(names(&other.fetch(&["hf:acme/tiny"])?)?, NEEDED);
    Ok(())
}

#[test]
fn missing_model_revision_or_file_is_reported() -> Result<()> {
    let hub = Hub::start(tiny())?;
    let machine = Machine::new(&hub)?;
    for (model, words) in [
        ("hf:acme/tiny@v9", &["404", MODEL, "v9"][..]),
        ("hf:acme/other", &["404", "acme/other", "main"]),
        ("hf:acme/tiny/q8.gguf", &["q8.gguf", "q4/tiny-Q4_0.gguf"]),
        ("hf:tiny", &["hf:ORG/NAME"]),
    ] {
        let said = machine.refused(&[model])?;
        assert!(words.iter().all(|word| said.contains(word)), "{model}: {said}");
    }
    Ok(())
}

#[test]
fn uncached_model_offline_is_reported_with_a_remedy() -> Result<()> {
    let hub = Hub::start(tiny())?;
    let machine = Machine::new(&hub)?.with("HF_HUB_OFFLINE", "yes");
    let said = machine.refused(&["hf:acme/tiny"])?;
    assert!(said.contains("not in") && said.contains("HF_HUB_OFFLINE"), "{said}");
    assert!(hub.take_asked().is_empty());
    Ok(())
}

#[test]
fn unreachable_hub_is_reported_with_its_address() -> Result<()> {
    let hub = Hub::start(tiny())?;
    let machine = Machine::new(&hub)?;
    let address = hub.address.to_string();
    drop(hub);
    let said = machine.refused(&["hf:acme/tiny"])?;
    assert!(said.contains(&address) && said.contains("HF_ENDPOINT"), "{said}");
    Ok(())
}

/// Three processes need the same file at once: one downloads it, all use it.
#[tokio::test]
async fn cluster_downloads_and_serves_an_uncached_model() -> Result<()> {
    let file = "SmolLM2-135M-Instruct.Q4_1.gguf";
    let content = Content::OnDisk(smollm2(), sha256(&std::fs::read(smollm2())?));
    let files = [(file.to_owned(), content)].into();
    let hub = Hub::start(Behaviour { files, ..Behaviour::default() })?;
    let machine = Machine::new(&hub)?;
    let mut spec = ClusterSpec::smollm2();
    spec.model = format!("hf:{MODEL}@v1/{file}").into();
    spec.settings.extend(machine.variables.clone());
    let cluster = Cluster::start(spec).await?;
    let whole = hub
        .take_asked()
        .into_iter()
        .filter(|asked| asked.path.starts_with("/stored/") && asked.wants_content());
    assert_eq!(whole.count(), 1);
    let client = Client::new(cluster.http());
    let run = golden()
        .runs
        .into_iter()
        .find(|run| run.name == "code")
        .expect("the golden file has this run");
    assert_eq!(client.greedy(&run.prompt_ids, run.output_ids.len()).await?, run.output_ids);
    let (_, models) = client.get_json("/v1/models").await?;
    assert_eq!(models["data"][0]["id"], "SmolLM2-135M-Instruct.Q4_1", "{models}");
    cluster.stop()
}

#[tokio::test(flavor = "multi_thread")]
async fn up_downloads_and_serves_an_uncached_model() -> Result<()> {
    let file = "SmolLM2-135M-Instruct.Q4_1.gguf";
    let content = Content::OnDisk(whole_smollm2(), sha256(&std::fs::read(whole_smollm2())?));
    let files = [(file.to_owned(), content)].into();
    let hub = Hub::start(Behaviour { files, ..Behaviour::default() })?;
    let machine = Machine::new(&hub)?;
    let model = format!("hf:{MODEL}/{file}");
    let up = || {
        command::output(
            Command::new(bin_dir().join("baton"))
                .args(["up", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"])
                .args(["--sample", "--once", "--model", &model])
                .env_remove("HF_TOKEN")
                .env_remove("HF_HUB_CACHE")
                .env_remove("HF_HUB_OFFLINE")
                .env("BATON_NODE_KV_MEMORY", "64MiB")
                .envs(&machine.variables),
        )
    };
    let whole = |hub: &Hub| {
        let asked = hub.take_asked().into_iter();
        asked.filter(|asked| asked.path.starts_with("/stored/") && asked.wants_content()).count()
    };
    // The download precedes the start of all processes. Router, nodes and the next start download
    // nothing.
    for fetched in [1, 0] {
        let output = up()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{said}");
        assert!(String::from_utf8_lossy(&output.stdout).contains("Paris"), "{said}");
        assert_eq!(whole(&hub), fetched, "{said}");
    }
    Ok(())
}

#[test]
fn up_reports_a_model_missing_on_the_hub_in_one_line() -> Result<()> {
    let hub = Hub::start(tiny())?;
    let machine = Machine::new(&hub)?;
    let output = command::output(
        Command::new(bin_dir().join("baton"))
            .args(["up", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"])
            .args(["--model", "hf:acme/other"])
            .env_remove("HF_TOKEN")
            .env_remove("HF_HUB_OFFLINE")
            .envs(&machine.variables),
    )?;
    let said = String::from_utf8(output.stderr)?;
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(said.contains("404") && said.contains("acme/other"), "{said}");
    Ok(())
}

#[test]
fn sigterm_during_the_download_stops_up() -> Result<()> {
    let silent = TcpListener::bind("127.0.0.1:0")?;
    silent.set_nonblocking(true)?;
    let home = tempfile::tempdir()?;
    let variables = [
        ("HF_HUB_CACHE", home.path().display().to_string()),
        ("HF_HUB_OFFLINE", "0".to_owned()),
        ("HF_ENDPOINT", format!("http://{}", silent.local_addr()?)),
        ("NO_PROXY", "127.0.0.1".to_owned()),
    ];
    let variables = variables.map(|(name, value)| (name.to_owned(), value)).into();
    let args = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--model", "hf:acme/tiny"];
    let mut up = Up::start(&args, &variables)?;
    // Keep the connection: the download waits for an answer.
    let _connection = loop {
        match silent.accept() {
            Ok(connection) => break connection,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        ensure!(up.child.try_wait()?.is_none(), "{:?}", up.lines.seen());
        std::thread::sleep(Duration::from_millis(10));
    };
    signal(up.child.id(), "TERM");
    assert_eq!(up.wait()?, Some(0), "{:?}", up.lines.all());
    Ok(())
}
