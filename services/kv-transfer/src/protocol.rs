//! The transfer protocol as pure state machines, without sockets, clocks or threads.
//!
//! [`Core`] takes events and the current time, and returns [`Action`]s and the next deadline. Its
//! driver calls
//!
//! * [`Core::handle_command`], [`Core::handle_control`], [`Core::handle_data`] and
//!   [`Core::handle_peer_failed`] when an event occurs,
//! * [`Core::on_deadline`] at [`Core::next_deadline`],
//! * [`Core::poll_action`] after each of these until it returns `None`, and executes the actions in
//!   order.
//!
//! `pair` is the connection of two processes, `transfer` is one transfer with the steps of its two
//! sides in `sender` and `receiver`, `abort` is the failure path, and `core` dispatches between
//! them.
//!
//! Invariants:
//! * A transfer that the node has started ends with exactly one final event.
//! * `Arrived` is emitted only when every reserved block is written and `DONE` matches.
//! * A transfer in progress was started under the current weights of the process.
//! * A failed event is emitted only when the transport has released every block of the transfer.
//! * Blocks are back within lease + 0.5 s after the other side aborted, finished or died, or failed
//!   to start the transfer. Only a side whose node wants the transfer names it in heartbeats, and
//!   only this renews the lease. The first lease of a receiver is the `answer_timeout` of its
//!   command.
//! * Only pairs with work send heartbeats. A lost pair loses all its transfers.

mod abort;
mod chunks;
mod core;
mod event_context;
mod pair;
mod receiver;
mod sender;
mod tombstone;
mod transfer;

#[cfg(test)]
pub(crate) use self::event_context::test_local;
pub use self::{
    core::Core,
    event_context::{Action, Counters, DataEvent, Local},
};
