//! Test hub with one model: serves a folder over HTTP with the paths, headers and redirects of the
//! real hub, and with the faults that a test selects.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Result, bail};
use serde_json::json;

pub(crate) const MODEL: &str = "acme/tiny";
pub(crate) const BRANCHES: [&str; 2] = ["main", "v1"];
pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const SOCKET_MAX: Duration = Duration::from_secs(20);
const HEADER_LINES_MAX: usize = 100;

/// Contents and behaviour of the hub.
#[derive(Default)]
pub(crate) struct Behaviour {
    pub files: BTreeMap<String, Content>,
    /// Token that every request must have.
    pub token: Option<String>,
    /// Files whose first full response is cut after this many bytes.
    pub cut_once: BTreeMap<String, usize>,
    /// Files with a wrong SHA-256 in their header.
    pub damaged: BTreeSet<String>,
    /// Large files whose content is missing. Their headers and their size are known.
    pub without_content: BTreeSet<String>,
}

#[derive(Clone)]
pub(crate) enum Content {
    /// Small file: sent directly, with a number as its ETag.
    Plain(Vec<u8>),
    /// Large file: a redirect to its storage, with its SHA-256 as ETag.
    Large(Arc<Vec<u8>>, String),
    /// Like `Large`, read from a file on request.
    OnDisk(PathBuf, String),
}

/// A request that the hub received.
#[derive(Clone, Debug)]
pub(crate) struct ReceivedRequest {
    pub path: String,
    pub range: Option<String>,
}

impl ReceivedRequest {
    /// Returns whether the request is more than a query of headers and size.
    pub(crate) fn wants_content(&self) -> bool {
        self.range.as_deref() != Some("bytes=0-0")
    }
}

pub(crate) struct Hub {
    pub address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    behaviour: Mutex<Behaviour>,
    asked: Mutex<Vec<ReceivedRequest>>,
    stopped: AtomicBool,
}

impl Hub {
    pub(crate) fn start(behaviour: Behaviour) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            behaviour: Mutex::new(behaviour),
            asked: Mutex::default(),
            stopped: AtomicBool::new(false),
        });
        let own = shared.clone();
        let thread = std::thread::spawn(move || {
            std::thread::scope(|scope| {
                for stream in listener.incoming().map_while(Result::ok) {
                    if own.stopped.load(Ordering::Acquire) {
                        return;
                    }
                    let own = &own;
                    // Some tests disconnect the client early.
                    scope.spawn(move || own.answer(stream, address).ok());
                }
            });
        });
        Ok(Self { address, shared, thread: Some(thread) })
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns all requests so far and clears the list.
    pub(crate) fn take_asked(&self) -> Vec<ReceivedRequest> {
        std::mem::take(&mut self.shared.asked.lock().unwrap())
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Release);
        let woken = TcpStream::connect(self.address).is_ok();
        if let Some(thread) = self.thread.take().filter(|_| woken) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn answer(&self, stream: TcpStream, address: SocketAddr) -> Result<()> {
        stream.set_read_timeout(Some(SOCKET_MAX))?;
        stream.set_write_timeout(Some(SOCKET_MAX))?;
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        let Some(request) = lines.next() else { bail!("no request") };
        let path = request?.split(' ').nth(1).unwrap_or_default().to_owned();
        let mut headers = BTreeMap::new();
        for line in lines.take(HEADER_LINES_MAX) {
            let line = line?;
            let Some((name, value)) = line.split_once(':') else { break };
            headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
        }
        let range = headers.get("range").cloned();
        self.asked
            .lock()
            .unwrap()
            .push(ReceivedRequest { path: path.clone(), range: range.clone() });
        let Reply { head, body, cut } = self.reply(&path, &headers, range.as_deref(), address);
        let mut stream = stream;
        let length = body.len();
        write!(stream, "HTTP/1.1 {head}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n")?;
        stream.write_all(&body[..cut.unwrap_or(length).min(length)])?;
        Ok(stream.flush()?)
    }

    fn reply(
        &self,
        path: &str,
        headers: &BTreeMap<String, String>,
        range: Option<&str>,
        address: SocketAddr,
    ) -> Reply {
        let mut behaviour = self.behaviour.lock().unwrap();
        let stored = path.strip_prefix("/stored/");
        let shown = headers.get("authorization").map(|value| value.replace("Bearer ", ""));
        if stored.is_none() && behaviour.token.is_some() && shown != behaviour.token {
            return Reply::head(if shown.is_some() { "403 Forbidden" } else { "401 Unauthorized" });
        }
        if let Some(name) = stored {
            let wants_content = range != Some("bytes=0-0");
            if wants_content && behaviour.without_content.contains(name) {
                return Reply::head("404 Not Found");
            }
            let cut = wants_content.then(|| behaviour.cut_once.remove(name));
            return match behaviour.files.get(name) {
                Some(content) => Reply::part(&content.bytes(), range, "").cut(cut.flatten()),
                None => Reply::head("404 Not Found"),
            };
        }
        let known = |revision: &str| BRANCHES.contains(&revision) || revision == COMMIT;
        if let Some(revision) = path.strip_prefix(&format!("/api/models/{MODEL}/revision/")) {
            if !known(revision) {
                return Reply::head("404 Not Found");
            }
            let files: Vec<_> =
                behaviour.files.keys().map(|name| json!({"rfilename": name})).collect();
            let info = json!({"id": MODEL, "sha": COMMIT, "siblings": files}).to_string();
            return Reply { body: info.into(), ..Reply::head("200 OK") };
        }
        let file = path.strip_prefix(&format!("/{MODEL}/resolve/")).and_then(|p| p.split_once('/'));
        let Some((_, name)) = file.filter(|(revision, _)| known(revision)) else {
            return Reply::head("404 Not Found");
        };
        match behaviour.files.get(name) {
            None => Reply::head("404 Not Found"),
            Some(Content::Plain(bytes)) => {
                let tag = format!("etag: \"{:040x}\"\r\nx-repo-commit: {COMMIT}\r\n", bytes.len());
                Reply::part(bytes, range, &tag)
            }
            Some(Content::Large(_, sha256) | Content::OnDisk(_, sha256)) => {
                let other = behaviour.damaged.contains(name);
                let sha256 = if other { "f".repeat(64) } else { sha256.clone() };
                Reply::head(&format!(
                    "302 Found\r\nlocation: http://{address}/stored/{name}\r\nx-linked-etag: \
                     \"{sha256}\"\r\nx-repo-commit: {COMMIT}"
                ))
            }
        }
    }
}

impl Content {
    fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Plain(bytes) => bytes.clone(),
            Self::Large(bytes, _) => bytes.to_vec(),
            Self::OnDisk(path, _) => {
                let mut bytes = Vec::new();
                let file =
                    std::fs::File::open(path).and_then(|mut file| file.read_to_end(&mut bytes));
                file.expect("the file is there");
                bytes
            }
        }
    }
}

struct Reply {
    head: String,
    body: Vec<u8>,
    cut: Option<usize>,
}

impl Reply {
    fn head(status: &str) -> Self {
        Self { head: status.to_owned(), body: Vec::new(), cut: None }
    }

    /// Returns the bytes of `range`, which is `bytes=FIRST-` or `bytes=FIRST-LAST`.
    fn part(bytes: &[u8], range: Option<&str>, more: &str) -> Self {
        let total = bytes.len();
        let range = range.and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
        let (first, last) = range.unwrap_or(("0", ""));
        let first: usize = first.parse().unwrap_or(0);
        let end = last.parse().map_or(total, |last: usize| total.min(last + 1));
        if first >= end {
            return Self::head("416 Range Not Satisfiable");
        }
        let last = end - 1;
        let head =
            format!("206 Partial Content\r\n{more}content-range: bytes {first}-{last}/{total}");
        Self { head, body: bytes[first..end].to_vec(), cut: None }
    }

    fn cut(self, cut: Option<usize>) -> Self {
        Self { cut, ..self }
    }
}
