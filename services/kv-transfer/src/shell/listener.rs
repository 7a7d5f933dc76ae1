//! The listener thread: receives, checks the tag, parses, hands on. Nothing here waits for anyone.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use crossbeam_channel::Sender;

use super::{
    StartError,
    sockets::{self, ZapAuth},
};
use crate::{
    api::Epoch,
    control::{InvalidMessage, Keys, VerifiedMessage, Verifier},
    metrics::ControlCounters,
    threads::Threads,
};

/// How long dropping a listener may take.
const DROP_MAX: Duration = Duration::from_secs(1);
/// The longest wait for a message, so that a lost wake-up is not for ever.
const POLL_MS: i64 = 1_000;
/// Messages taken in one go, before the door is looked at again.
const BATCH: usize = 64;

/// A context has one listener, as it has one door.
const STOP: &str = "inproc://kv-transfer-stop";

pub struct Listener {
    /// A message here ends the thread. Used by one thread at a time.
    stop: Mutex<zmq::Socket>,
    thread: Threads,
    port: u16,
}

impl Listener {
    pub fn start(
        context: &zmq::Context,
        bind: SocketAddr,
        keys: Keys,
        me: Epoch,
        messages: Sender<VerifiedMessage>,
        counters: Arc<ControlCounters>,
    ) -> Result<Self, StartError> {
        let bind_error = |error: zmq::Error| StartError::ControlBind {
            address: bind,
            reason: error.to_string(),
        };
        let door = ZapAuth::open(context, keys.clone(), me).map_err(bind_error)?;
        // From the door to the socket nobody is let in: questions wait for the thread.
        let (router, port) = sockets::listener(context, bind).map_err(bind_error)?;
        let (stop, stopped) = stop_pair(context).map_err(bind_error)?;
        let name = "kv-messages";
        let thread = Threads::default();
        let mut receiver = Receiver {
            router,
            door,
            stopped,
            verifier: Verifier::new(keys, me),
            messages,
            counters,
        };
        thread
            .spawn(name, move || receiver.run())
            .map_err(|source| StartError::Thread { name: name.to_owned(), source })?;
        Ok(Self { stop: Mutex::new(stop), thread, port })
    }

    /// The one really bound.
    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn shutdown(&self, deadline: Instant) -> Vec<String> {
        {
            let stop = self.stop.lock().unwrap_or_else(PoisonError::into_inner);
            // Fails only when the thread is gone.
            let _ = stop.send("stop", zmq::DONTWAIT);
        }
        self.thread.join_all(deadline)
    }
}

impl Drop for Listener {
    /// For a start that fails halfway; otherwise the thread has ended before.
    fn drop(&mut self) {
        self.shutdown(Instant::now() + DROP_MAX);
    }
}

fn stop_pair(context: &zmq::Context) -> zmq::Result<(zmq::Socket, zmq::Socket)> {
    let (stop, stopped) = (context.socket(zmq::PAIR)?, context.socket(zmq::PAIR)?);
    stop.set_linger(0)?;
    stopped.set_linger(0)?;
    stopped.bind(STOP)?;
    stop.connect(STOP)?;
    Ok((stop, stopped))
}

struct Receiver {
    router: zmq::Socket,
    door: ZapAuth,
    stopped: zmq::Socket,
    verifier: Verifier,
    messages: Sender<VerifiedMessage>,
    counters: Arc<ControlCounters>,
}

impl Receiver {
    fn run(&mut self) {
        loop {
            let mut items = [
                self.router.as_poll_item(zmq::POLLIN),
                self.door.socket().as_poll_item(zmq::POLLIN),
                self.stopped.as_poll_item(zmq::POLLIN),
            ];
            match zmq::poll(&mut items, POLL_MS) {
                Ok(_) | Err(zmq::Error::EINTR) => {}
                Err(error) => return tracing::error!(%error, "the message listener has ended"),
            }
            if items[2].is_readable() {
                return;
            }
            if let Err(error) = self.admit().and_then(|()| self.take_batch())
                && error != zmq::Error::EINTR
            {
                return tracing::error!(%error, "the message listener has ended");
            }
        }
    }

    fn admit(&self) -> zmq::Result<()> {
        for _ in 0..BATCH {
            match self.door.answer()? {
                Some(true) => {}
                Some(false) => self.counters.refuse("door"),
                None => break,
            }
        }
        Ok(())
    }

    fn take_batch(&mut self) -> zmq::Result<()> {
        for _ in 0..BATCH {
            let Some((parts, count)) = sockets::receive(&self.router)? else { break };
            // The first part is the routing id, which says nothing.
            let opened = if count == parts.len() && count > 0 {
                let frames: Vec<&[u8]> = parts[1..].iter().map(|part| &part[..]).collect();
                self.verifier.verify(&frames)
            } else {
                Err(InvalidMessage::Frames { frames: count.saturating_sub(1) })
            };
            match opened {
                Ok(opened) => {
                    self.counters.received();
                    if self.messages.try_send(opened).is_err() {
                        // Whatever matters is said again.
                        self.counters.refuse("driver_busy");
                    }
                }
                Err(refusal) => {
                    tracing::debug!(%refusal, "a message was refused");
                    self.counters.refuse(refusal.label());
                }
            }
        }
        Ok(())
    }
}
