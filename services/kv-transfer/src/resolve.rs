//! Resolves an endpoint to socket addresses within a deadline.
//!
//! An IP address needs no resolver. A host name goes to the system resolver, which may block
//! without limit and cannot be interrupted, so each lookup runs on its own thread and the caller
//! waits a bounded time. A thread whose caller has timed out ends when the system answers. It owns
//! only the name, so no thread joins it, and at most [`LOOKUPS_MAX`] of them exist.

use std::{
    io,
    net::{SocketAddr, ToSocketAddrs},
    sync::{Arc, atomic::AtomicUsize},
    thread,
    time::Duration,
};

use crossbeam_channel::{RecvTimeoutError, bounded};

use crate::threads::Permit;

/// Time-out of a lookup: half a lease, so that the other half is left to connect.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum number of lookups in flight, including those whose caller has timed out.
const LOOKUPS_MAX: usize = 16;

/// Function that resolves one `host:port`; may block.
type Lookup = dyn Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync;

/// Resolver that the threads of one node share to connect to peers.
#[derive(Clone)]
pub(crate) struct Resolver {
    lookup: Arc<Lookup>,
    /// Number of lookups in flight.
    running: Arc<AtomicUsize>,
    timeout: Duration,
}

/// Reason why an endpoint has no address.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ResolveError {
    #[error("cannot resolve the endpoint: unknown scheme; expected tcp://host:port")]
    Scheme,
    #[error("cannot resolve {host}: {source}")]
    System { host: String, source: io::Error },
    #[error("cannot resolve {host}: the name has no address")]
    NoAddress { host: String },
    #[error("cannot resolve {host}: no answer within {} ms", timeout.as_millis())]
    Deadline { host: String, timeout: Duration },
    #[error("cannot resolve {host}: {LOOKUPS_MAX} lookups are in flight, the maximum")]
    Busy { host: String },
}

impl Resolver {
    /// Returns a resolver that uses the system resolver.
    pub(crate) fn system() -> Self {
        Self::new(LOOKUP_TIMEOUT, |host| Ok(host.to_socket_addrs()?.collect()))
    }

    fn new(
        timeout: Duration,
        lookup: impl Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync + 'static,
    ) -> Self {
        Self { lookup: Arc::new(lookup), running: Arc::default(), timeout }
    }

    /// Returns at least one address of `tcp://host:port`.
    pub(crate) fn resolve(&self, endpoint: &str) -> Result<Vec<SocketAddr>, ResolveError> {
        let host = endpoint.strip_prefix("tcp://").ok_or(ResolveError::Scheme)?;
        if let Ok(address) = host.parse() {
            return Ok(vec![address]);
        }
        let running = Permit::take(&self.running, LOOKUPS_MAX)
            .ok_or_else(|| ResolveError::Busy { host: host.to_owned() })?;
        let (answer, answered) = bounded(1);
        let (lookup, name) = (Arc::clone(&self.lookup), host.to_owned());
        thread::Builder::new()
            .name("kv-lookup".to_owned())
            .spawn(move || {
                let found = lookup(&name);
                // Frees the slot before the answer, so that the caller can start its next lookup
                // at once.
                drop(running);
                // Fails if the caller has timed out.
                let _ = answer.send(found);
            })
            .map_err(|source| ResolveError::System { host: host.to_owned(), source })?;
        match answered.recv_timeout(self.timeout) {
            Ok(Ok(addresses)) if addresses.is_empty() => {
                Err(ResolveError::NoAddress { host: host.to_owned() })
            }
            Ok(Ok(addresses)) => Ok(addresses),
            Ok(Err(source)) => Err(ResolveError::System { host: host.to_owned(), source }),
            // A panic in the lookup disconnects the channel.
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                Err(ResolveError::Deadline { host: host.to_owned(), timeout: self.timeout })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crossbeam_channel::Receiver;

    use super::*;

    /// Long enough never to expire in a passing test.
    const LONG: Duration = Duration::from_secs(60);

    /// Returns a resolver whose lookups do not answer until the sender is dropped.
    fn silent(timeout: Duration) -> (Resolver, crossbeam_channel::Sender<()>) {
        let (hang_up, silence): (_, Receiver<()>) = bounded(0);
        let resolver = Resolver::new(timeout, move |_| {
            let _ = silence.recv();
            Err(io::ErrorKind::NotFound.into())
        });
        (resolver, hang_up)
    }

    #[test]
    fn ip_address_needs_no_lookup() {
        let resolver = Resolver::new(LONG, |host| panic!("{host} was resolved"));
        for address in ["127.0.0.1:9", "[::1]:65535"] {
            let found = resolver.resolve(&format!("tcp://{address}")).unwrap();
            assert_eq!(found, [address.parse().unwrap()]);
        }
        assert!(matches!(resolver.resolve("ipc://127.0.0.1:9"), Err(ResolveError::Scheme)));
    }

    #[test]
    fn system_resolves_localhost_and_rejects_invalid_names() {
        let resolver = Resolver::system();
        let found = resolver.resolve("tcp://localhost:7").unwrap();
        assert!(found.iter().all(|address| address.ip().is_loopback() && address.port() == 7));
        // RFC 6761 reserves the name for lookups that must fail. The system may fail or time out;
        // both errors name the host.
        let error = resolver.resolve("tcp://nowhere.invalid:7").unwrap_err();
        assert!(error.to_string().contains("nowhere.invalid:7"), "{error}");
        let error = resolver.resolve("tcp://no port").unwrap_err();
        assert!(matches!(error, ResolveError::System { .. }), "{error}");
    }

    #[test]
    fn lookup_without_an_answer_times_out() {
        let (resolver, _hang_up) = silent(Duration::from_millis(1));
        let error = resolver.resolve("tcp://slow:7").unwrap_err();
        assert!(matches!(error, ResolveError::Deadline { .. }), "{error}");
        assert_eq!(error.to_string(), "cannot resolve slow:7: no answer within 1 ms");
    }

    #[test]
    fn timed_out_lookups_are_bounded_and_free_their_slot_when_they_end() {
        let (resolver, hang_up) = silent(Duration::from_millis(1));
        for _ in 0..LOOKUPS_MAX {
            let error = resolver.resolve("tcp://slow:7").unwrap_err();
            assert!(matches!(error, ResolveError::Deadline { .. }), "{error}");
        }
        for _ in 0..3 {
            let error = resolver.resolve("tcp://one-more:7").unwrap_err();
            assert!(matches!(error, ResolveError::Busy { .. }), "{error}");
        }
        assert!(resolver.resolve("tcp://127.0.0.1:7").is_ok(), "addresses need no lookup slot");
        drop(hang_up);
        let patient = Resolver { timeout: LONG, ..resolver };
        // Until the first lookup thread has ended, no slot is free.
        loop {
            match patient.resolve("tcp://one-more:7").unwrap_err() {
                ResolveError::Busy { .. } => thread::yield_now(),
                other => break assert!(matches!(other, ResolveError::System { .. }), "{other}"),
            }
        }
    }
}
