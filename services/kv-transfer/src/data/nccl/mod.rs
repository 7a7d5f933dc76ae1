//! KV by kernels of both GPUs, through NCCL.
//!
//! 1. The sender invites; the receiver says that it can, and what the sender needs to join; then both join,
//!    which ends with a greeting to and fro. Where that fails on either side it says so, the other gives up
//!    as well, and the sender comes again by another transport. Who leaves without a word has died, or wants
//!    nothing any more.
//! 2. For each chunk that is written and that the receiver has cleared the sender says which blocks it is of. The
//!    receiver answers `Go` and puts its half of the operation into its stream; the sender puts its own when told. So
//!    no kernel waits for data that does not exist, and the order is the sender's.
//! 3. Each side reports when the end of its half has been written into the host's memory. It does not ask the
//!    driver, which may be waiting for the end of another pair's channel.
//!
//! At most eight chunks of a pair are under way on either side, one behind the other in the channel's streams. A chunk
//! that was told to `Go` is always sent, cancelled or not: the other end's kernel waits for it. What ends a
//! kernel that waits in vain, for its peer has died or stopped, is an abort of this pair's channel, after
//! a lease or at the end of the connection; blocks of chunks under way are given back when it has
//! returned, and never if it does not.

mod receiver;
mod sender;

use std::{
    thread,
    time::{Duration, Instant},
};

use kernels::peer::Moving;

pub(in crate::data) use receiver::receive_chunks;
pub(in crate::data) use sender::send_chunks;

/// Chunks of one pair under way.
const UNDER_WAY_MAX: usize = 8;

/// How long the two may take to join: the first time in a process is a matter of seconds.
const JOINING_MAX: Duration = Duration::from_secs(10);

/// How long one glance at the connection waits while the other end is awaited.
const GLANCE: Duration = Duration::from_millis(1);

/// For so long an end is looked for without a pause: longer than most chunks take.
const SPIN: Duration = Duration::from_millis(2);
/// The pause between looks from then on.
const PAUSE: Duration = Duration::from_micros(50);

/// Looks for the end of an operation until it is there, or `in_vain` says why it never will be.
fn until_done<B>(
    moving: &mut dyn Moving<B>,
    mut in_vain: impl FnMut(Duration) -> Option<String>,
) -> Result<(), String> {
    let start = Instant::now();
    while !moving.is_done()? {
        let waited = start.elapsed();
        if waited < SPIN {
            thread::yield_now();
            continue;
        }
        if let Some(reason) = in_vain(waited) {
            return Err(reason);
        }
        thread::sleep(PAUSE);
    }
    Ok(())
}
