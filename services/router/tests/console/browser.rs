//! A headless Chromium, driven over the DevTools protocol on a pair of pipes.

use std::{
    io::{BufRead, BufReader, Write},
    process::{ChildStdin, Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tempfile::TempDir;
use test_harness::KilledOnDrop;

/// Time-out of every wait: a browser takes seconds to start on a busy machine.
const DEADLINE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);
/// Programs by preference. The first has no window system among its dependencies.
const PROGRAMS: [&str; 4] =
    ["chromium-headless-shell", "chromium", "google-chrome", "chrome-headless-shell"];

/// A page in a browser of its own.
pub(crate) struct Page {
    requests: ChildStdin,
    messages: mpsc::Receiver<Value>,
    session: Option<String>,
    last_id: u64,
    /// Events that the browser sent between answers.
    events: Vec<Value>,
    _browser: KilledOnDrop,
    _profile: TempDir,
}

impl Page {
    /// Opens an empty page. Skips the test where no browser is installed.
    pub(crate) fn open() -> Self {
        let found = |program: &&str| {
            let version = Command::new(program).arg("--version").output();
            version.is_ok_and(|version| version.status.success())
        };
        let Some(program) = PROGRAMS.into_iter().find(found) else {
            test_harness::skip(format!("no browser: none of {}", PROGRAMS.join(", ")));
        };
        let profile = tempfile::tempdir().unwrap();
        // The browser reads requests from file descriptor 3 and writes answers to 4.
        let mut command = Command::new("sh");
        command.args(["-c", r#"exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1"#, program]);
        command.args(["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]);
        command.arg(format!("--user-data-dir={}", profile.path().display()));
        let browser = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut browser = KilledOnDrop(browser);
        let (requests, answers) = (browser.stdin.take().unwrap(), browser.stdout.take().unwrap());
        let (sender, messages) = mpsc::channel();
        // Ends with the browser, which closes its end of the pipe.
        thread::spawn(move || {
            for message in BufReader::new(answers).split(0).map_while(Result::ok) {
                let message = serde_json::from_slice(&message).expect("the browser sends JSON");
                if sender.send(message).is_err() {
                    return;
                }
            }
        });
        let mut page = Self {
            requests,
            messages,
            session: None,
            last_id: 0,
            events: Vec::new(),
            _browser: browser,
            _profile: profile,
        };
        let target = page.call("Target.createTarget", json!({"url": "about:blank"}));
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let session = page.call("Target.attachToTarget", attach);
        page.session = session["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Network", "Log"] {
            page.call(&format!("{domain}.enable"), json!({}));
        }
        page
    }

    /// Calls a method of the DevTools protocol.
    pub(crate) fn call(&mut self, method: &str, params: Value) -> Value {
        self.last_id += 1;
        let mut request = json!({"id": self.last_id, "method": method, "params": params});
        if let Some(session) = &self.session {
            request["sessionId"] = session.as_str().into();
        }
        self.requests.write_all(format!("{request}\0").as_bytes()).expect("the browser runs");
        let deadline = Instant::now() + DEADLINE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut message = self.messages.recv_timeout(left).expect("the browser answers");
            if message["id"] != self.last_id {
                self.events.push(message);
                continue;
            }
            assert!(message["error"].is_null(), "{method}: {message}");
            return message["result"].take();
        }
    }

    pub(crate) fn go_to(&mut self, url: &str) {
        self.call("Page.navigate", json!({"url": url}));
    }

    /// Returns the value of a JavaScript expression.
    pub(crate) fn value(&mut self, expression: &str) -> Value {
        let params = json!({"expression": expression, "returnByValue": true});
        let mut outcome = self.call("Runtime.evaluate", params);
        assert!(outcome["exceptionDetails"].is_null(), "{expression}: {outcome}");
        outcome["result"]["value"].take()
    }

    /// Waits until a JavaScript expression is true.
    pub(crate) fn wait(&mut self, expression: &str) {
        let deadline = Instant::now() + DEADLINE;
        while self.value(&format!("Boolean({expression})")) != true {
            let late = Instant::now() > deadline;
            assert!(!late, "not true: {expression}: {}", self.value("document.body.innerText"));
            thread::sleep(POLL);
        }
    }

    /// Presses and releases a key, such as Enter, Tab or a letter.
    pub(crate) fn press(&mut self, key: &str) {
        let (code, text) = match key {
            "Enter" => (13, "\r"),
            "Tab" => (9, ""),
            letter => (u32::from(letter.as_bytes()[0].to_ascii_uppercase()), letter),
        };
        for kind in ["keyDown", "keyUp"] {
            let mut event = json!({"type": kind, "key": key, "windowsVirtualKeyCode": code});
            if kind == "keyDown" && !text.is_empty() {
                event["text"] = text.into();
            }
            self.call("Input.dispatchKeyEvent", event);
        }
    }

    /// Returns the URLs of all requests of the page.
    pub(crate) fn requested_urls(&self) -> Vec<&str> {
        let sent = self.events.iter().filter(|it| it["method"] == "Network.requestWillBeSent");
        sent.filter_map(|it| it["params"]["request"]["url"].as_str()).collect()
    }

    /// Returns exceptions, violations of the content security policy, and other errors.
    pub(crate) fn errors(&self) -> Vec<&Value> {
        let is_error = |it: &&Value| match it["method"].as_str() {
            Some("Runtime.exceptionThrown") => true,
            Some("Log.entryAdded") => it["params"]["entry"]["level"] == "error",
            _ => false,
        };
        self.events.iter().filter(is_error).collect()
    }
}
