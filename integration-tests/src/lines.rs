//! Reads the output of a process line by line.

use std::{
    io::{BufRead, BufReader, Read},
    sync::mpsc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

const DEADLINE: Duration = Duration::from_secs(60);

/// Lines of a pipe. A thread of its own reads them, so that the process never blocks on the pipe.
pub struct Lines {
    coming: mpsc::Receiver<String>,
    seen: Vec<String>,
}

impl Lines {
    pub fn of(stream: impl Read + Send + 'static) -> Self {
        let (sender, coming) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stream).lines().map_while(Result::ok) {
                if sender.send(line.trim_end_matches('\r').to_owned()).is_err() {
                    return;
                }
            }
        });
        Self { coming, seen: Vec::new() }
    }

    /// Reads until a line contains `words`.
    pub fn wait_for(&mut self, words: &str) -> Result<String> {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self
                .coming
                .recv_timeout(left)
                .with_context(|| format!("no line with {words:?} in\n{}", self.seen.join("\n")))?;
            self.seen.push(line.clone());
            if line.contains(words) {
                return Ok(line);
            }
        }
    }

    /// Returns the lines read so far.
    pub fn seen(&self) -> &[String] {
        &self.seen
    }

    /// Returns all lines of a process that has ended.
    pub fn all(&mut self) -> &[String] {
        while let Ok(line) = self.coming.recv_timeout(DEADLINE) {
            self.seen.push(line);
        }
        &self.seen
    }
}
