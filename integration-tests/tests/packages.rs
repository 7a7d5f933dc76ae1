//! The Python wheel: pip installs it into an empty environment, and `baton up` answers there. Also
//! the labels of images, and the files of images that need no build.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    process::{Command, ExitCode, Stdio},
};

use anyhow::{Context, Result, ensure};
use integration_tests::{
    cluster::{bin_dir, whole_smollm2},
    command::output,
};
use serde_json::Value;

/// Time of creation in the tests of labels, in seconds since 1970.
const CREATED: &str = "86400";

fn run(command: &mut Command) -> Result<String> {
    let output = output(command)?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {said}{error}");
    Ok(said)
}

fn wheel_serves_from_an_empty_environment() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/dist.sh");
    // Another target folder: the packages of the user stay.
    run(Command::new(script).env("BATON_BIN", bin_dir()).env("CARGO_TARGET_DIR", folder.path()))?;
    let packages = std::fs::read_dir(folder.path().join("dist"))?.collect::<Result<Vec<_>, _>>()?;
    let is_wheel = |path: &std::path::PathBuf| path.extension().is_some_and(|it| it == "whl");
    let wheel = packages.iter().map(std::fs::DirEntry::path).find(is_wheel).context("no wheel")?;

    let environment = folder.path().join("venv");
    run(Command::new("python3").args(["-m", "venv"]).arg(&environment))?;
    run(Command::new(environment.join("bin/pip")).args(["install", "--no-index"]).arg(wheel))?;
    let addresses = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"];
    let said = run(Command::new(environment.join("bin/baton"))
        .args(["up", "--sample", "--once"])
        .args(addresses)
        .arg("--model")
        .arg(whole_smollm2()))?;
    assert!(said.contains("Paris"), "{said}");
    Ok(())
}

fn image_with_kernels_has_the_libraries_of_rdma_adapters() -> Result<()> {
    let root = tempfile::tempdir()?;
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/image/rdma.sh");
    // The script fails if a library lacks one that it links.
    run(Command::new(script).arg(root.path()))?;
    let drivers = root.path().join("etc/libibverbs.d");
    ensure!(drivers.join("mlx5.driver").exists(), "libibverbs finds drivers by {drivers:?}");
    Ok(())
}

/// Returns the labels by their names without `org.opencontainers.image.`.
fn labels(environment: &[(&str, &str)]) -> Result<BTreeMap<String, String>> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/image/labels.sh");
    let mut command = Command::new(script);
    for name in ["BATON_SOURCE", "BATON_URL", "SOURCE_DATE_EPOCH"] {
        command.env_remove(name);
    }
    let said = run(command.arg("baton").envs(environment.iter().copied()))?;
    let label = |line: &str| {
        let label =
            line.strip_prefix("org.opencontainers.image.").and_then(|it| it.split_once('='));
        label.map(|(name, value)| (name.to_owned(), value.to_owned())).context(line.to_owned())
    };
    said.lines().map(label).collect()
}

/// Returns the environment in which git knows only this address of the repository.
fn remote(address: &str) -> [(&str, &str); 3] {
    [
        ("GIT_CONFIG_COUNT", "1"),
        ("GIT_CONFIG_KEY_0", "remote.origin.url"),
        ("GIT_CONFIG_VALUE_0", address),
    ]
}

fn labels_name_the_source_without_secrets_and_the_time_of_creation() -> Result<()> {
    let git = |format: &str| run(Command::new("git").args(["log", "-1", format]));
    let commit = git("--format=%H")?;
    for (address, source) in [
        ("https://example.com/a/b.git", Some("https://example.com/a/b")),
        ("https://user:secret@example.com/a/b", Some("https://example.com/a/b")),
        ("https://example.com:8443/a/b.git", Some("https://example.com:8443/a/b")),
        ("ssh://git@example.com:22/a/b.git", Some("https://example.com/a/b")),
        ("git@example.com:a/b.git", Some("https://example.com/a/b")),
        ("/a/folder", None),
    ] {
        let labels = labels(&remote(address))?;
        let label = |name: &str| labels.get(name).map(String::as_str);
        assert_eq!((label("source"), label("url")), (source, source), "{address}");
        assert_eq!(label("title"), Some("baton"));
        let version = label("version").context("no version")?;
        assert!(version.split('.').count() == 3, "{version}");
        let revision = label("revision").context("no revision")?;
        assert_eq!(revision.strip_suffix("-dirty").unwrap_or(revision), commit.trim());
        let created = label("created").context("no time of creation")?;
        let seconds = run(Command::new("date").args(["--utc", "+%s", "--date", created]))?;
        assert_eq!(seconds, git("--format=%ct")?, "{created}");
    }
    let set = labels(&[
        ("BATON_SOURCE", "https://example.com/c"),
        ("BATON_URL", "https://example.com"),
        ("SOURCE_DATE_EPOCH", CREATED),
    ])?;
    assert_eq!(set["source"], "https://example.com/c");
    assert_eq!(set["url"], "https://example.com");
    assert_eq!(set["created"], "1970-01-02T00:00:00Z");
    for (name, value, said) in [
        ("BATON_SOURCE", "a/folder", "a/folder"),
        ("BATON_URL", "https://user:secret@example.com", "https://…@example.com"),
        ("SOURCE_DATE_EPOCH", "now", "now"),
    ] {
        let error = labels(&[(name, value)]).unwrap_err().to_string();
        assert!(error.contains(&format!("invalid {name}: \"{said}\"; expected")), "{error}");
    }
    Ok(())
}

/// Packs an image of small programs, and reads its labels as a registry does.
fn packed_image_has_the_labels() -> Result<()> {
    let works = |program: &str, arguments: &[&str]| {
        let mut command = Command::new(program);
        let status = command.args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    };
    if !works("buildah", &["--version"])
        && !works("podman", &["--version"])
        && !works("docker", &["buildx", "version"])
    {
        test_harness::skip("none of buildah, podman and docker buildx is installed");
    }
    let folder = tempfile::tempdir()?;
    for program in ["baton", "baton-router", "baton-prefill-node", "baton-decode-node"] {
        fs::copy("/bin/true", folder.path().join(program))?;
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/image.sh");
    let environment = [
        ("BATON_IMAGE", "registry.example.com:5000/team/baton:1"),
        ("BATON_SOURCE", "https://example.com/baton"),
        ("SOURCE_DATE_EPOCH", CREATED),
    ];
    let mut command = Command::new(script);
    command.arg("cpu").env("BATON_BIN", folder.path()).env("CARGO_TARGET_DIR", folder.path());
    run(command.envs(environment).env_remove("BATON_URL"))?;

    let image = folder.path().join("image");
    run(Command::new("tar").args(["-xf", "cpu.tar"]).current_dir(&image))?;
    let index = json(&image.join("index.json"))?;
    let manifest = blob(&image, &index["manifests"][0])?;
    let config = blob(&image, &manifest["config"])?;
    assert_eq!(config["created"], "1970-01-02T00:00:00Z");
    let label =
        |name: &str| &config["config"]["Labels"][format!("org.opencontainers.image.{name}")];
    for (name, value) in [
        ("title", "baton"),
        ("created", "1970-01-02T00:00:00Z"),
        ("source", "https://example.com/baton"),
        ("url", "https://example.com/baton"),
        ("licenses", "Apache-2.0"),
    ] {
        assert_eq!(label(name), value, "{config}");
    }
    assert!(label("version").is_string() && label("revision").is_string(), "{config}");
    Ok(())
}

/// Returns the JSON that a descriptor of an unpacked image names by its digest.
fn blob(image: &Path, descriptor: &Value) -> Result<Value> {
    let digest = descriptor["digest"].as_str().context("no digest")?;
    json(&image.join("blobs").join(digest.replace(':', "/")))
}

fn json(path: &Path) -> Result<Value> {
    let text = fs::read(path).with_context(|| path.display().to_string())?;
    Ok(serde_json::from_slice(&text)?)
}

fn main() -> ExitCode {
    test_harness::main(
        &[],
        test_harness::tests![
            wheel_serves_from_an_empty_environment,
            image_with_kernels_has_the_libraries_of_rdma_adapters,
            labels_name_the_source_without_secrets_and_the_time_of_creation,
            packed_image_has_the_labels,
        ],
    )
}
