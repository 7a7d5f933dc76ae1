//! Transport `nccl`: NCCL's send and receive kernels move KV between GPUs.
//!
//! 1. The sender invites the receiver (`Offer`). The receiver answers `Accepted` with the data that
//!    the sender needs, and both join a communicator of two ranks. If joining fails on either side,
//!    that side sends `Refused`, the other side gives up too, and the sender reconnects with
//!    another transport. A peer that closes the connection without `Refused` has died or no longer
//!    needs the connection.
//! 2. When a chunk's KV is computed and its `CTS` has arrived, the sender announces the blocks
//!    (`Lend`). The receiver answers `Go` and launches its receive; the sender launches its send on
//!    `Go`. So no kernel waits for data that does not exist, and the sender decides the order.
//! 3. Each side reports a chunk when its kernel's completion flag appears in host memory. It does
//!    not query the CUDA driver, because the driver may be blocked on another pair's communicator.
//!
//! At most [`IN_FLIGHT_MAX`] chunks of a pair are in flight on either side, in stream order. The
//! sender sends every chunk that was told to `Go`, cancelled or not, because the receiver's kernel
//! waits for it. If a peer dies or stops, the kernel that waits for it ends when this node aborts
//! the communicator: after [`CHUNK_TIMEOUT`], or when the connection closes. The blocks of chunks
//! in flight are released when the abort has returned, and never if it does not return.

mod receiver;
mod sender;

use std::time::Duration;

use kernels::peer::{PeerChannel, TransferInFlight};

use super::chunk_ends::until_done;
use crate::{config::LEASE, transfer_kind::TransportChoice};

pub(in crate::data) use receiver::receive_chunks;
pub(in crate::data) use sender::send_chunks;

/// Chunks of one pair in flight on one side.
const IN_FLIGHT_MAX: usize = 8;

/// Time-out for both ranks to join. The first communicator of a process takes seconds.
const JOIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Time-out of one poll of the connection while the ranks join.
const JOIN_POLL: Duration = Duration::from_millis(1);

/// Time-out of a chunk: shorter than a lease, because an abort takes 0.51 s. NCCL's proxy thread
/// looks for the abort every 0.5 s, and freeing its memory takes 10 ms. So the blocks are free half
/// a second after the lease at the latest.
const CHUNK_TIMEOUT: Duration = LEASE.saturating_sub(Duration::from_millis(100));

/// Minimum rate at which `auto` uses NCCL, in bytes/s. Below this rate `tcp` is about as fast and
/// uses no SM: over sockets of loopback NCCL reaches 5 to 7 GB/s and `tcp` reaches 18.
const AUTO_RATE_MIN: u64 = 10_000_000_000;

/// Returns why this pair must not use NCCL although both ends have joined.
fn too_slow(choice: TransportChoice, probed_rate: u64) -> Option<String> {
    let is_slow = choice == TransportChoice::Auto && probed_rate < AUTO_RATE_MIN;
    let [probed, least] = [probed_rate, AUTO_RATE_MIN].map(|rate| rate as f64 / 1e9);
    is_slow.then(|| {
        format!(
            "NCCL moved {probed:.1} GB/s in a probe transfer; expected at least {least:.0}, or transfer.transport = nccl"
        )
    })
}

/// Waits for the end of an operation and returns its blocks. Fails when the connection `is_over`,
/// and with `late` after [`CHUNK_TIMEOUT`].
fn complete<B>(
    mut moving: Box<dyn TransferInFlight<B>>,
    is_over: impl Fn() -> bool,
    late: &str,
) -> Result<Vec<B>, String> {
    let hopeless = |waited| match is_over() {
        true => Some("the data connection has closed".to_owned()),
        false => (waited >= CHUNK_TIMEOUT)
            .then(|| format!("{late} for {} ms", CHUNK_TIMEOUT.as_millis())),
    };
    until_done(&mut *moving, hopeless)?;
    moving.finish()
}

/// Aborts the communicator and with it the operations in its stream. Fails if the abort does not
/// return: then the blocks in flight stay held.
fn abort(channel: &dyn PeerChannel) -> Result<(), String> {
    channel.abort().inspect_err(|stuck| {
        tracing::error!(
            stuck,
            "cannot abort the NCCL communicator: the blocks in flight stay held"
        );
    })
}
