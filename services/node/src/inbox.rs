//! What is asked of the engine thread, and the bounded queue it waits in.
//!
//! Every attempt takes one of a fixed number of places before it is queued; a place has room for one
//! arrival and one cancel. So arrivals beyond the bound are refused at once, and a cancel always
//! fits.

use std::{
    ops::Deref,
    sync::{Arc, PoisonError, RwLock},
};

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use engine::{event::SequenceId, executor::CollectWaker};
use kv_transfer::api::{ConnectGuard, PeerAddress};
use tokio::sync::{Semaphore, oneshot};

use crate::{
    attempt::Attempt,
    observe::ObserverEnds,
    refusal::Refusal,
    stream::{AttemptStream, EventSender, Place, attempt_stream},
};

/// Room for commands that belong to no attempt: observers, drain, stop.
const OTHER_COMMANDS_MAX: usize = 64;

/// One command to the engine thread.
#[derive(Debug)]
pub(crate) enum Command {
    Begin(Box<Arrival>),
    /// The caller is gone.
    Cancel {
        id: SequenceId,
        place: Place,
    },
    Observe(ObserverEnds),
    /// Transfers with these are to be expected.
    Connect {
        peers: Vec<PeerAddress>,
        /// They are sent to.
        sends: bool,
        guard: ConnectGuard,
    },
    /// Nothing new will come; tell observers.
    Drain,
    /// Ends every attempt with the failure `DRAINING`.
    EndAll,
    /// Leave the loop.
    Stop,
}

/// An attempt on its way to the scheduler.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub attempt: Attempt,
    pub events: EventSender,
    /// Answered once the scheduler has taken or refused it.
    pub verdict: oneshot::Sender<Result<(), Refusal>>,
    pub place: Place,
}

/// The callers' end of the engine thread. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Inbox {
    commands: CommandSender,
    places: Arc<Semaphore>,
    place_count: u32,
}

/// Puts commands into the queue and wakes the thread that takes them.
#[derive(Clone, Debug)]
pub(crate) struct CommandSender {
    queue: Sender<Command>,
    closed: Arc<RwLock<bool>>,
    waker: CollectWaker,
}

/// The engine thread's end of the queue. What still waits when it goes is dropped with it, which
/// refuses arrivals: the queue itself would keep them as long as anybody can send.
#[derive(Debug)]
pub(crate) struct CommandReceiver {
    queue: Receiver<Command>,
    closed: Arc<RwLock<bool>>,
}

impl CommandSender {
    pub fn new(commands_max: usize, waker: CollectWaker) -> (Self, CommandReceiver) {
        let (queue, received) = bounded(commands_max);
        let closed = Arc::new(RwLock::new(false));
        let received = CommandReceiver { queue: received, closed: closed.clone() };
        (Self { queue, closed, waker }, received)
    }

    /// Never waits.
    pub fn send(&self, command: Command) -> Result<(), TrySendError<Command>> {
        let closed = self.closed.read().unwrap_or_else(PoisonError::into_inner);
        if *closed {
            return Err(TrySendError::Disconnected(command));
        }
        self.queue.try_send(command)?;
        drop(closed);
        self.waker.wake();
        Ok(())
    }
}

impl Deref for CommandReceiver {
    type Target = Receiver<Command>;

    fn deref(&self) -> &Self::Target {
        &self.queue
    }
}

impl Drop for CommandReceiver {
    fn drop(&mut self) {
        *self.closed.write().unwrap_or_else(PoisonError::into_inner) = true;
        while self.queue.try_recv().is_ok() {}
    }
}

impl Inbox {
    /// A queue for at most `place_count` attempts in work.
    pub fn new(place_count: u32, waker: CollectWaker) -> (Self, CommandReceiver) {
        let commands_max = 2 * place_count as usize + OTHER_COMMANDS_MAX;
        let (commands, received) = CommandSender::new(commands_max, waker);
        let places = Arc::new(Semaphore::new(place_count as usize));
        (Self { commands, places, place_count }, received)
    }

    /// Asks the engine to begin; comes back when the scheduler took the attempt. Dropping the future
    /// or the stream cancels.
    pub async fn begin(&self, attempt: Attempt) -> Result<AttemptStream, Refusal> {
        let place = self.places.clone().try_acquire_owned().map_err(|_| Refusal::Busy {
            reason: format!("all {} places of this node are taken", self.place_count),
        })?;
        let place = Arc::new(place);
        let (events, stream) = attempt_stream(attempt.id(), self.commands.clone(), place.clone());
        let (verdict, answer) = oneshot::channel();
        let arrival = Box::new(Arrival { attempt, events, verdict, place });
        if let Err(error) = self.commands.send(Command::Begin(arrival)) {
            stream.refused();
            return Err(match error {
                TrySendError::Full(_) => Refusal::Busy { reason: "the inbox is full".into() },
                TrySendError::Disconnected(_) => Refusal::Stopped,
            });
        }
        match answer.await.unwrap_or(Err(Refusal::Stopped)) {
            Ok(()) => Ok(stream),
            Err(refusal) => {
                stream.refused();
                Err(refusal)
            }
        }
    }

    /// For commands that belong to no attempt.
    pub fn send(&self, command: Command) -> Result<(), Refusal> {
        self.commands.send(command).map_err(|error| match error {
            TrySendError::Full(_) => Refusal::Busy { reason: "the inbox is full".into() },
            TrySendError::Disconnected(_) => Refusal::Stopped,
        })
    }

    /// Comes back when no attempt is in work.
    pub async fn idle(&self) {
        // The semaphore is never closed.
        let _ = self.places.acquire_many(self.place_count).await;
    }

    /// Attempts in work.
    pub fn in_work(&self) -> u32 {
        self.place_count - self.places.available_permits() as u32
    }
}
