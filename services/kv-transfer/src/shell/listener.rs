//! The listener thread: receives control messages, opens them, and passes them to the
//! driver. It never blocks on another thread.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use crossbeam_channel::Sender;

use super::{
    StartError,
    sockets::{self, ZapAuth},
};
use crate::{
    api::Epoch,
    control::{InvalidMessage, Keys, Opener},
    driver::Input,
    metrics::Metrics,
    threads::{Threads, locked},
};

/// Time-out of dropping a listener.
const DROP_MAX: Duration = Duration::from_secs(1);
/// Longest wait for a message; bounds the effect of a lost wake-up.
const POLL_MS: i64 = 1_000;
/// Messages received before ZAP requests are checked again.
const BATCH: usize = 64;

/// Endpoint of the stop signal. It is unique within a ZeroMQ context, because a context has one
/// listener.
const STOP: &str = "inproc://kv-transfer-stop";

pub(super) struct Listener {
    /// A message on this socket stops the thread. Used by one thread at a time.
    stop: Mutex<zmq::Socket>,
    thread: Threads,
    /// The bound port.
    pub port: u16,
}

impl Listener {
    pub(super) fn start(
        context: &zmq::Context,
        bind: SocketAddr,
        keys: Keys,
        me: Epoch,
        messages: Sender<Input>,
        metrics: Arc<Metrics>,
    ) -> Result<Self, StartError> {
        let bind_error = |error: zmq::Error| StartError::ControlBind {
            address: bind,
            reason: error.to_string(),
        };
        let zap = ZapAuth::open(context, keys.clone(), me).map_err(bind_error)?;
        // ZAP requests queue up until the thread runs, so no client is admitted before.
        let (router, port) = sockets::listener(context, bind).map_err(bind_error)?;
        let (stop, stopped) = stop_pair(context).map_err(bind_error)?;
        let name = "kv-control";
        let thread = Threads::default();
        let mut receiver =
            Receiver { router, zap, stopped, opener: Opener::new(keys, me), messages, metrics };
        thread
            .spawn(name, move || receiver.run())
            .map_err(|source| StartError::Thread { name: name.to_owned(), source })?;
        Ok(Self { stop: Mutex::new(stop), thread, port })
    }

    pub(super) fn shutdown(&self, deadline: Instant) -> Vec<String> {
        {
            let stop = locked(&self.stop);
            // Fails only if the thread has ended.
            let _ = stop.send("stop", zmq::DONTWAIT);
        }
        self.thread.join_all(deadline)
    }
}

impl Drop for Listener {
    /// Cleans up after a failed start; otherwise the thread has already ended.
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
    zap: ZapAuth,
    stopped: zmq::Socket,
    opener: Opener,
    messages: Sender<Input>,
    metrics: Arc<Metrics>,
}

impl Receiver {
    fn run(&mut self) {
        loop {
            let mut items = [
                self.router.as_poll_item(zmq::POLLIN),
                self.zap.socket.as_poll_item(zmq::POLLIN),
                self.stopped.as_poll_item(zmq::POLLIN),
            ];
            match zmq::poll(&mut items, POLL_MS) {
                Ok(_) | Err(zmq::Error::EINTR) => {}
                Err(error) => return tracing::error!(%error, "the control listener has stopped"),
            }
            if items[2].is_readable() {
                return;
            }
            if let Err(error) = self.admit().and_then(|()| self.take_batch())
                && error != zmq::Error::EINTR
            {
                return tracing::error!(%error, "the control listener has stopped");
            }
        }
    }

    fn admit(&mut self) -> zmq::Result<()> {
        for _ in 0..BATCH {
            match self.zap.answer()? {
                Some(true) => {}
                Some(false) => self.metrics.refuse_control("zap_auth"),
                None => break,
            }
        }
        Ok(())
    }

    fn take_batch(&mut self) -> zmq::Result<()> {
        for _ in 0..BATCH {
            let Some((parts, count)) = sockets::receive(&self.router)? else { break };
            // The first part is the routing id, which is not used.
            let opened = if count == parts.len() && count > 0 {
                let frames: Vec<&[u8]> = parts[1..].iter().map(|part| &part[..]).collect();
                self.opener.open(&frames)
            } else {
                Err(InvalidMessage::Frames { frames: count.saturating_sub(1) })
            };
            match opened {
                Ok((from, message)) => {
                    self.metrics.count(|counts| counts.control_received += 1);
                    let input = Input::Control { from, message: Box::new(message) };
                    if self.messages.try_send(input).is_err() {
                        // Important messages are retransmitted.
                        self.metrics.refuse_control("driver_busy");
                    }
                }
                Err(error) => {
                    tracing::debug!(%error, "control message rejected");
                    self.metrics.refuse_control(error.label());
                }
            }
        }
        Ok(())
    }
}
