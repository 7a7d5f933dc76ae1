//! From an endpoint to socket addresses, within a deadline.
//!
//! What is an address already costs nothing. A name goes to the system, whose look-up may block for
//! as long as it likes and cannot be interrupted; so it runs on a thread of its own, for which its
//! caller waits a bounded time. A thread that is given up ends when the system answers. It holds
//! nothing but the name, so nobody joins it, and there are never more than [`LOOK_UPS_MAX`].

use std::{
    fmt, io,
    net::{SocketAddr, ToSocketAddrs},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use crossbeam_channel::{RecvTimeoutError, bounded};

/// How long a caller waits for a name: half a lease, so that the other half is left to connect.
const LOOK_UP: Duration = Duration::from_secs(1);
/// Look-ups under way, those given up included. Each is a thread that waits for a name server.
const LOOK_UPS_MAX: usize = 16;

/// Looks one `host:port` up; may block.
type LookUp = dyn Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync;

/// Shared by the threads of one node that connect to peers.
#[derive(Clone)]
pub struct Resolver {
    look_up: Arc<LookUp>,
    /// Look-ups under way.
    running: Arc<AtomicUsize>,
    patience: Duration,
}

/// Why an endpoint has no address.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    #[error("it must start with tcp://")]
    Scheme,
    #[error("{host} cannot be looked up: {source}")]
    System { host: String, source: io::Error },
    #[error("{host} has no address")]
    NoAddress { host: String },
    #[error("the look-up of {host} took longer than {} ms", patience.as_millis())]
    Deadline { host: String, patience: Duration },
    #[error("{host} cannot be looked up: {LOOK_UPS_MAX} look-ups are under way, the most")]
    Busy { host: String },
}

impl Resolver {
    /// Asks the system.
    pub fn system() -> Self {
        Self::new(LOOK_UP, |host| Ok(host.to_socket_addrs()?.collect()))
    }

    fn new(
        patience: Duration,
        look_up: impl Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync + 'static,
    ) -> Self {
        Self { look_up: Arc::new(look_up), running: Arc::default(), patience }
    }

    /// The addresses of `tcp://host:port`, at least one.
    pub fn resolve(&self, endpoint: &str) -> Result<Vec<SocketAddr>, ResolveError> {
        let host = endpoint.strip_prefix("tcp://").ok_or(ResolveError::Scheme)?;
        if let Ok(address) = host.parse() {
            return Ok(vec![address]);
        }
        let running = Running::begin(&self.running)
            .ok_or_else(|| ResolveError::Busy { host: host.to_owned() })?;
        let (answer, answered) = bounded(1);
        let (look_up, name) = (Arc::clone(&self.look_up), host.to_owned());
        thread::Builder::new()
            .name("kv-look-up".to_owned())
            .spawn(move || {
                let found = look_up(&name);
                // Before the answer: whoever has it may look up the next name.
                drop(running);
                // Fails when nobody waits any more.
                let _ = answer.send(found);
            })
            .map_err(|source| ResolveError::System { host: host.to_owned(), source })?;
        match answered.recv_timeout(self.patience) {
            Ok(Ok(addresses)) if addresses.is_empty() => {
                Err(ResolveError::NoAddress { host: host.to_owned() })
            }
            Ok(Ok(addresses)) => Ok(addresses),
            Ok(Err(source)) => Err(ResolveError::System { host: host.to_owned(), source }),
            // Disconnected: the look-up panicked, and there is no answer either.
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                Err(ResolveError::Deadline { host: host.to_owned(), patience: self.patience })
            }
        }
    }
}

impl fmt::Debug for Resolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let running = self.running.load(Ordering::Relaxed);
        f.debug_struct("Resolver").field("running", &running).finish_non_exhaustive()
    }
}

/// One of the look-ups under way, until it is dropped.
struct Running(Arc<AtomicUsize>);

impl Running {
    fn begin(running: &Arc<AtomicUsize>) -> Option<Self> {
        running
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |count| {
                (count < LOOK_UPS_MAX).then_some(count + 1)
            })
            .is_ok()
            .then(|| Self(Arc::clone(running)))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use crossbeam_channel::Receiver;

    use super::*;

    /// Never waited for in a test that passes.
    const LONG: Duration = Duration::from_secs(60);

    /// A name server that says nothing until the sender is dropped.
    fn silent(patience: Duration) -> (Resolver, crossbeam_channel::Sender<()>) {
        let (hang_up, silence): (_, Receiver<()>) = bounded(0);
        let resolver = Resolver::new(patience, move |_| {
            let _ = silence.recv();
            Err(io::ErrorKind::NotFound.into())
        });
        (resolver, hang_up)
    }

    #[test]
    fn an_address_needs_no_look_up() {
        let resolver = Resolver::new(LONG, |host| panic!("{host} was looked up"));
        for address in ["127.0.0.1:9", "[::1]:65535"] {
            let found = resolver.resolve(&format!("tcp://{address}")).unwrap();
            assert_eq!(found, [address.parse().unwrap()]);
        }
        assert!(matches!(resolver.resolve("ipc://127.0.0.1:9"), Err(ResolveError::Scheme)));
    }

    #[test]
    fn the_system_knows_this_host_and_not_what_can_be_no_host() {
        let resolver = Resolver::system();
        let found = resolver.resolve("tcp://localhost:7").unwrap();
        assert!(found.iter().all(|address| address.ip().is_loopback() && address.port() == 7));
        // The name is reserved for never being found (RFC 6761). The system may say so or be too
        // slow in saying so; either way there is an end and the name is in it.
        let error = resolver.resolve("tcp://nowhere.invalid:7").unwrap_err();
        assert!(error.to_string().contains("nowhere.invalid:7"), "{error}");
        let error = resolver.resolve("tcp://no port").unwrap_err();
        assert!(matches!(error, ResolveError::System { .. }), "{error}");
    }

    #[test]
    fn a_look_up_without_an_answer_is_given_up() {
        let (resolver, _hang_up) = silent(Duration::from_millis(1));
        let error = resolver.resolve("tcp://slow:7").unwrap_err();
        assert!(matches!(error, ResolveError::Deadline { .. }), "{error}");
        assert_eq!(error.to_string(), "the look-up of slow:7 took longer than 1 ms");
    }

    #[test]
    fn look_ups_that_were_given_up_are_bounded_and_make_room_when_they_end() {
        let (resolver, hang_up) = silent(Duration::from_millis(1));
        for _ in 0..LOOK_UPS_MAX {
            let error = resolver.resolve("tcp://slow:7").unwrap_err();
            assert!(matches!(error, ResolveError::Deadline { .. }), "{error}");
        }
        for _ in 0..3 {
            let error = resolver.resolve("tcp://one-more:7").unwrap_err();
            assert!(matches!(error, ResolveError::Busy { .. }), "{error}");
        }
        assert!(resolver.resolve("tcp://127.0.0.1:7").is_ok(), "addresses wait for nobody");
        drop(hang_up);
        let patient = Resolver { patience: LONG, ..resolver };
        // Each thread ends by itself; until the first has, there is no room.
        loop {
            match patient.resolve("tcp://one-more:7").unwrap_err() {
                ResolveError::Busy { .. } => thread::yield_now(),
                other => break assert!(matches!(other, ResolveError::System { .. }), "{other}"),
            }
        }
    }
}
