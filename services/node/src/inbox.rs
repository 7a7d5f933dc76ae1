//! The bounded queues of commands and of transfer events to the engine thread.
//!
//! Every attempt takes one of a fixed number of permits before it is queued. The queue has room for
//! one arrival and one cancel per permit. So an arrival beyond the bound is rejected at once, and a
//! cancel always fits. Commands of routers that belong to no attempt take permits of their own.

use std::{
    ops::Deref,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use engine::{event::InFlight, executor::CollectWaker};
use futures_util::StreamExt;
use kv_transfer::{EventSink, api as transfer};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use weight_transfer::UpdateId;

use crate::{
    adapters::NodeAdapters,
    attempt::NewAttempt,
    node_core::{CallId, ChangePending, Refusal, Reply},
    observe::ObserverSender,
    stream::{AttemptPermit, AttemptStream, ReplySender, attempt_stream},
    trace::StepTraceRequest,
};

/// Queued commands of routers that belong to no attempt: new observers, peers to connect to, calls
/// of operators.
const ROUTER_COMMANDS_MAX: usize = 64;
/// Interval at which a draining node checks whether its last attempt has ended.
const IDLE_CHECK: Duration = Duration::from_millis(5);
/// Commands that the node sends once each: [`EngineCommand::Drain`], [`EngineCommand::EndAll`],
/// [`EngineCommand::Stop`].
const NODE_COMMANDS_MAX: usize = 3;

/// One command to the engine thread.
#[derive(Debug)]
pub(crate) enum EngineCommand {
    Begin(Box<Arrival>),
    /// The caller dropped its call.
    Cancel {
        call: CallId,
        /// Held until the engine thread has taken the command: the queue's bound counts it.
        _permit: AttemptPermit,
    },
    Observe {
        observer: ObserverSender,
        /// Held until the engine thread has taken the command.
        _permit: OwnedSemaphorePermit,
    },
    /// Connect to these peers, because transfers with them are expected.
    Connect {
        commands: Vec<transfer::Command>,
        /// Held until the engine thread has taken the command.
        _permit: OwnedSemaphorePermit,
    },
    /// An operator stops or resumes the acceptance of calls.
    SetDraining {
        draining: bool,
        /// Held until the engine thread has taken the command.
        _permit: OwnedSemaphorePermit,
    },
    /// Drop the cached blocks that no sequence uses.
    ResetPrefixCache {
        /// Receives the number of dropped blocks.
        dropped: oneshot::Sender<u32>,
        /// Held until the engine thread has taken the command.
        _permit: OwnedSemaphorePermit,
    },
    /// An adapter was loaded or unloaded.
    AdaptersChanged {
        adapters: NodeAdapters,
        /// Held until the engine thread has taken the command.
        _permit: OwnedSemaphorePermit,
    },
    /// Record a trace.
    Trace {
        request: StepTraceRequest,
        /// Held until the engine thread has taken the command.
        _permit: OwnedSemaphorePermit,
    },
    /// Compute with the prepared weights from the next step boundary on.
    ChangeWeights {
        weight_version: u64,
        label: String,
        in_flight: InFlight,
        /// Whether running sequences may finish before.
        waits: bool,
        /// Receives the time for which no step ran.
        changed: oneshot::Sender<Result<Duration, ChangePending>>,
        /// Held until the engine thread has taken the command.
        _permit: OwnedSemaphorePermit,
    },
    /// Release the weights in use at the next step boundary, and launch no step until
    /// [`EngineCommand::ChangeWeights`].
    ReleaseWeights {
        update: UpdateId,
        /// Whether running sequences may finish before.
        waits: bool,
        /// Notified when the weights are released.
        released: oneshot::Sender<Result<(), ChangePending>>,
        /// Held until the engine thread has taken the command.
        _permit: OwnedSemaphorePermit,
    },
    /// The update that released the weights was aborted. No effect after the release by another
    /// update.
    LoseWeights {
        update: UpdateId,
        /// Receives whether the node has no valid weights now.
        lost: oneshot::Sender<bool>,
        /// Held until the engine thread has taken the command.
        _permit: OwnedSemaphorePermit,
    },
    /// Serve nothing until [`EngineCommand::Resume`].
    Pause {
        in_flight: InFlight,
        /// Whether running sequences may finish.
        waits: bool,
        /// Time until the node serves again by itself.
        at_most: Duration,
        /// Held until the engine thread has taken the command.
        _permit: OwnedSemaphorePermit,
    },
    /// End a pause.
    Resume {
        /// Held until the engine thread has taken the command.
        _permit: OwnedSemaphorePermit,
    },
    /// Reject new calls and tell observers.
    Drain {
        /// Time until [`EngineCommand::EndAll`].
        grace: Duration,
    },
    /// End every attempt with the failure `DRAINING`.
    EndAll,
    /// End every attempt, then the thread.
    Stop,
}

/// An attempt on its way to the scheduler.
#[derive(Debug)]
pub(crate) struct Arrival {
    /// Unique among the calls of this process.
    pub call_number: u64,
    pub attempt: NewAttempt,
    /// [`NewAttempt::prompt_hash`], which takes about 1 ms for a long prompt: too long for the
    /// engine thread.
    pub prompt_hash: u128,
    pub replies: ReplySender,
    pub permit: AttemptPermit,
}

/// The callers' end of the engine thread. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct EngineInbox {
    commands: CommandSender,
    permits: Arc<Semaphore>,
    attempts_max: u32,
    router_permits: Arc<Semaphore>,
    next_call: Arc<AtomicU64>,
}

/// Sender of commands, which wakes the engine thread.
#[derive(Clone, Debug)]
pub(crate) struct CommandSender {
    queue: Sender<EngineCommand>,
    closed: Arc<RwLock<bool>>,
    waker: CollectWaker,
}

/// The engine thread's end of the queue. Dropping it drops the queued commands, which rejects
/// queued arrivals; the queue itself would keep them as long as a sender lives.
#[derive(Debug)]
pub(crate) struct CommandReceiver {
    queue: Receiver<EngineCommand>,
    closed: Arc<RwLock<bool>>,
}

impl CommandSender {
    pub(crate) fn new(commands_max: usize, waker: CollectWaker) -> (Self, CommandReceiver) {
        let (queue, received) = bounded(commands_max);
        let closed = Arc::new(RwLock::new(false));
        let received = CommandReceiver { queue: received, closed: closed.clone() };
        (Self { queue, closed, waker }, received)
    }

    /// Sends a command to the engine thread. Never waits.
    pub(crate) fn send(&self, command: EngineCommand) -> Result<(), TrySendError<EngineCommand>> {
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
    type Target = Receiver<EngineCommand>;

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

impl EngineInbox {
    /// Returns a queue for at most `attempts_max` attempts at a time.
    pub(crate) fn new(attempts_max: u32, waker: CollectWaker) -> (Self, CommandReceiver) {
        let commands_max = 2 * attempts_max as usize + ROUTER_COMMANDS_MAX + NODE_COMMANDS_MAX;
        let (commands, received) = CommandSender::new(commands_max, waker);
        let inbox = Self {
            commands,
            permits: Arc::new(Semaphore::new(attempts_max as usize)),
            attempts_max,
            router_permits: Arc::new(Semaphore::new(ROUTER_COMMANDS_MAX)),
            next_call: Arc::default(),
        };
        (inbox, received)
    }

    /// Sends the attempt to the engine thread and waits until the scheduler has accepted it.
    /// Dropping the future or the stream cancels the attempt.
    pub(crate) async fn begin(&self, attempt: NewAttempt) -> Result<AttemptStream, Refusal> {
        let permit = self.permits.clone().try_acquire_owned().map_err(|_| {
            let reason = format!("the node has {} attempts, its maximum", self.attempts_max);
            Refusal::Busy { reason }
        })?;
        let permit = Arc::new(permit);
        let call_number = self.next_call.fetch_add(1, Ordering::Relaxed);
        let call = CallId { sequence: attempt.id(), number: call_number };
        let (replies, mut stream) = attempt_stream(call, self.commands.clone(), permit.clone());
        let prompt_hash = attempt.prompt_hash();
        let arrival = Box::new(Arrival { call_number, attempt, prompt_hash, replies, permit });
        if let Err(error) = self.send(EngineCommand::Begin(arrival)) {
            stream.discard();
            return Err(error);
        }
        match stream.next().await {
            Some(Reply::Rejected(refusal)) => Err(refusal),
            Some(Reply::Ended(_)) | None => Err(Refusal::Stopped),
            // The first reply of an accepted attempt may be an event.
            Some(first) => {
                stream.put_back(first);
                Ok(stream)
            }
        }
    }

    /// Sends a command of a router that belongs to no attempt.
    pub(crate) fn send_for_router(
        &self,
        command: impl FnOnce(OwnedSemaphorePermit) -> EngineCommand,
    ) -> Result<(), Refusal> {
        let permit = self.router_permits.clone().try_acquire_owned().map_err(|_| {
            let reason = format!("{ROUTER_COMMANDS_MAX} commands of routers are queued");
            Refusal::Busy { reason }
        })?;
        self.send(command(permit))
    }

    pub(crate) fn send(&self, command: EngineCommand) -> Result<(), Refusal> {
        self.commands.send(command).map_err(|error| match error {
            TrySendError::Full(_) => {
                Refusal::Busy { reason: "the engine thread's queue is full".into() }
            }
            TrySendError::Disconnected(_) => Refusal::Stopped,
        })
    }

    /// Waits until the node has no attempt. Polls the number of permits: a waiter of the semaphore
    /// would take the free permits, which the calls that move sequences away need.
    pub(crate) async fn idle(&self) {
        while self.attempt_count() > 0 {
            tokio::time::sleep(IDLE_CHECK).await;
        }
    }

    pub(crate) fn attempt_count(&self) -> u32 {
        self.attempts_max - self.permits.available_permits() as u32
    }
}

/// Each transfer has at most two events: `Ready` and its final event.
const EVENTS_PER_TRANSFER: usize = 2;

/// Sender of transfer events, which wakes the engine thread.
pub(crate) struct TransferEvents {
    queue: Sender<transfer::Event>,
    waker: CollectWaker,
}

impl TransferEvents {
    pub(crate) fn new(
        transfers_max: usize,
        waker: CollectWaker,
    ) -> (Self, Receiver<transfer::Event>) {
        let (queue, events) = bounded(EVENTS_PER_TRANSFER * transfers_max);
        (Self { queue, waker }, events)
    }
}

impl EventSink for TransferEvents {
    fn offer(&mut self, event: transfer::Event) -> Result<(), transfer::Event> {
        self.queue.offer(event)?;
        self.waker.wake();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{
        pin::pin,
        task::{Context, Waker},
    };

    use engine::event::{NewSequence, SequenceId, SequenceKind};
    use kernels::sampling::Sampling;

    use super::*;

    fn attempt() -> NewAttempt {
        NewAttempt {
            request_id: 1,
            weight_version: 1,
            sequence: NewSequence {
                id: SequenceId(1),
                kind: SequenceKind::Compute,
                tokens: vec![1],
                prompt_len: 1,
                sampling: Sampling::greedy(),
                max_tokens: 1,
                ignore_stop_tokens: false,
                cache_salt: String::new(),
                adapter: None,
                session: Default::default(),
                constraint: None,
                deadline: std::time::Instant::now(),
            },
            adapter: None,
            grammar: None,
            peer: None,
            traceparent: String::new(),
        }
    }

    /// Without a bound of their own, enough `Meet` calls would fill the queue, and the cancel of an
    /// attempt would be lost.
    #[tokio::test]
    async fn queued_commands_of_routers_leave_room_for_attempts_and_their_cancels() {
        let (inbox, commands) = EngineInbox::new(1, CollectWaker::default());
        let connect = || {
            inbox.send_for_router(|_permit| EngineCommand::Connect { commands: vec![], _permit })
        };
        for _ in 0..ROUTER_COMMANDS_MAX {
            connect().unwrap();
        }
        assert!(matches!(connect(), Err(Refusal::Busy { .. })));
        {
            let mut begin = pin!(inbox.begin(attempt()));
            let mut context = Context::from_waker(Waker::noop());
            assert!(begin.as_mut().poll(&mut context).is_pending());
        }
        for command in [
            EngineCommand::Drain { grace: Duration::ZERO },
            EngineCommand::EndAll,
            EngineCommand::Stop,
        ] {
            inbox.send(command).unwrap();
        }
        let queued: Vec<EngineCommand> = std::iter::from_fn(|| commands.try_recv().ok()).collect();
        let count =
            |is_kind: fn(&EngineCommand) -> bool| queued.iter().filter(|it| is_kind(it)).count();
        assert_eq!(count(|it| matches!(it, EngineCommand::Cancel { .. })), 1);
        assert_eq!(count(|it| matches!(it, EngineCommand::Stop)), 1);
        drop(queued);
        connect().unwrap();
    }
}
