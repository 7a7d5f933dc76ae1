//! The sending end of a data connection: a queue of borrowed chunks, the thread that writes them,
//! and one that only waits for the connection's end. A receiver says nothing here, so a read that
//! returns is the first sign that it has died.

use std::{
    collections::VecDeque,
    io::{self, IoSlice, Read, Write},
    net::{Shutdown, SocketAddr, TcpStream, ToSocketAddrs},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use kernels::BlockRead;
use xxhash_rust::xxh3::Xxh3;

use super::{
    Shared,
    frame::Header,
    handshake,
    stream::{LOOK, is_pause},
};
use crate::{
    api::{Epoch, TransferId},
    config::LEASE,
    protocol::DataEvent,
    transport::{DataError, Released},
};

/// Chunks that wait for one peer. Each transfer holds back its own next chunks until `CTS`, so this
/// is reached only by very many transfers to a peer that takes nothing.
const QUEUE_MAX: usize = 4096;

/// What is hashed and handed to the kernel in one go: still in the second-level cache when the
/// kernel copies it.
const PIECE_BYTES: usize = 256 << 10;
const PIECE_SLICES: usize = 16;

const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);
/// How long the watcher sits in one read.
const WATCH: Duration = Duration::from_secs(1);
const CONNECT_PAUSE: Duration = Duration::from_millis(50);

/// Shared by the driver, which fills it, and the writer thread, which empties it.
pub struct Outbox {
    connection: u64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    /// The transfer whose chunk the writer holds, and whether it is still wanted.
    writing: Option<(TransferId, Wanted)>,
    /// To be interrupted when the outbox is closed.
    stream: Option<TcpStream>,
    /// By the driver: nothing more is wanted of this connection.
    closed: bool,
    /// By the watcher: how the connection ended.
    broken: Option<String>,
    /// By the writer: the connection has ended, what comes is dropped.
    ended: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Yes,
    Cancelled,
    /// Cancelled, and its blocks are given back.
    Released,
}

struct Job {
    transfer: TransferId,
    chunk: u32,
    blocks: Vec<BlockRead>,
}

impl Outbox {
    pub fn new(connection: u64) -> Self {
        Self { connection, state: Mutex::default(), changed: Condvar::new() }
    }

    pub fn connection(&self) -> u64 {
        self.connection
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn push(
        &self,
        transfer: TransferId,
        chunk: u32,
        blocks: Vec<BlockRead>,
    ) -> Result<(), DataError> {
        let mut state = self.lock();
        if state.closed || state.ended {
            // Its end is reported.
            return Ok(());
        }
        if state.queue.len() >= QUEUE_MAX {
            return Err(DataError::QueueFull { queued: state.queue.len() });
        }
        state.queue.push_back(Job { transfer, chunk, blocks });
        self.changed.notify_one();
        Ok(())
    }

    pub fn cancel(&self, transfer: TransferId) -> Released {
        let mut state = self.lock();
        state.queue.retain(|job| job.transfer != transfer);
        match &mut state.writing {
            Some((writing, wanted)) if *writing == transfer && *wanted == Wanted::Yes => {
                *wanted = Wanted::Cancelled;
                Released::Later
            }
            _ => Released::Now,
        }
    }

    pub fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.queue.clear();
        if let Some(stream) = &state.stream {
            // Fails only when the connection is gone already.
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.changed.notify_one();
    }

    /// The next chunk, or `None` when the outbox is closed or the connection has ended.
    fn next(&self) -> Option<Job> {
        let mut state = self.lock();
        loop {
            if state.closed || state.broken.is_some() {
                return None;
            }
            if let Some(job) = state.queue.pop_front() {
                state.writing = Some((job.transfer, Wanted::Yes));
                return Some(job);
            }
            let (woken, _) = self
                .changed
                .wait_timeout(state, Duration::from_secs(1))
                .unwrap_or_else(PoisonError::into_inner);
            state = woken;
        }
    }

    fn is_closed(&self) -> bool {
        self.lock().closed
    }

    fn break_off(&self, reason: String) {
        let mut state = self.lock();
        state.broken.get_or_insert(reason);
        if let Some(stream) = &state.stream {
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.changed.notify_one();
    }

    fn is_cancelled(&self) -> bool {
        matches!(self.lock().writing, Some((_, Wanted::Cancelled)))
    }

    /// The writer has given back the blocks of the chunk it holds; true when someone waits for it.
    fn released(&self) -> bool {
        match &mut self.lock().writing {
            Some((_, wanted)) if *wanted == Wanted::Cancelled => {
                *wanted = Wanted::Released;
                true
            }
            _ => false,
        }
    }
}

/// The writer thread, from connecting to the end of the connection.
pub fn run(shared: &Shared, outbox: &Outbox, peer: Epoch, endpoint: &str) {
    let reason = match connect(shared, outbox, peer, endpoint) {
        Ok(Some(stream)) => match use_connection(shared, outbox, stream) {
            Ok(()) => "it was closed".to_owned(),
            Err(error) => error.to_string(),
        },
        Ok(None) => "it was closed".to_owned(),
        Err(error) => format!("it was not made: {error}"),
    };
    let reason = {
        let mut state = outbox.lock();
        state.ended = true;
        state.queue.clear();
        state.stream = None;
        let reason = state.broken.take().unwrap_or(reason);
        (!state.closed).then(|| format!("data connection to {endpoint}: {reason}"))
    };
    if let Some(reason) = reason {
        shared.report_end(peer, outbox.connection, reason);
    }
}

/// Tries for one lease; `None` when the outbox was closed meanwhile.
fn connect(
    shared: &Shared,
    outbox: &Outbox,
    peer: Epoch,
    endpoint: &str,
) -> io::Result<Option<TcpStream>> {
    let deadline = Instant::now() + LEASE;
    loop {
        let error = match connect_once(shared, peer, endpoint) {
            Ok(stream) => {
                let mut state = outbox.lock();
                if state.closed {
                    return Ok(None);
                }
                state.stream = Some(stream.try_clone()?);
                return Ok(Some(stream));
            }
            Err(error) => error,
        };
        let state = outbox.lock();
        if state.closed {
            return Ok(None);
        }
        // A peer that has greeted us listens: when nobody does any more it is gone. What else fails
        // may be a listener that is busy with strangers.
        if error.kind() == io::ErrorKind::ConnectionRefused || Instant::now() >= deadline {
            return Err(error);
        }
        // Closing ends the pause.
        let _paused = outbox
            .changed
            .wait_timeout_while(state, CONNECT_PAUSE, |state| !state.closed)
            .unwrap_or_else(PoisonError::into_inner);
    }
}

fn connect_once(shared: &Shared, peer: Epoch, endpoint: &str) -> io::Result<TcpStream> {
    let host_and_port = endpoint.strip_prefix("tcp://").unwrap_or(endpoint);
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    let addresses: Vec<SocketAddr> = host_and_port.to_socket_addrs()?.collect();
    for address in addresses {
        let made = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT).and_then(|mut stream| {
            stream.set_nodelay(true)?;
            handshake::connect(&mut stream, &shared.keys, shared.me, peer)
                .map_err(io::Error::other)?;
            Ok(stream)
        });
        match made {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Until the outbox is closed or the connection ends.
fn use_connection(shared: &Shared, outbox: &Outbox, mut stream: TcpStream) -> io::Result<()> {
    let watched = stream.try_clone()?;
    thread::scope(|scope| {
        thread::Builder::new()
            .name("kv-data-watch".to_owned())
            .spawn_scoped(scope, || watch(outbox, watched))?;
        let written = write_frames(shared, outbox, &mut stream);
        // Ends the watcher. Fails only when the connection is gone already.
        let _ = stream.shutdown(Shutdown::Both);
        written
    })
}

fn watch(outbox: &Outbox, mut stream: TcpStream) {
    let reason = loop {
        match stream.set_read_timeout(Some(WATCH)).and_then(|()| stream.read(&mut [0; 1])) {
            Ok(0) => break "the peer closed it".to_owned(),
            Ok(_) => break "the peer spoke where it has nothing to say".to_owned(),
            Err(error) if is_pause(&error) => {}
            Err(error) => break error.to_string(),
        }
        if outbox.is_closed() {
            return;
        }
    };
    outbox.break_off(reason);
}

fn write_frames(shared: &Shared, outbox: &Outbox, stream: &mut TcpStream) -> io::Result<()> {
    stream.set_write_timeout(Some(LOOK))?;
    while let Some(job) = outbox.next() {
        let (transfer, chunk) = (job.transfer, job.chunk);
        let written = write_frame(outbox, stream, job, || {
            shared.report(DataEvent::SendReleased { transfer });
        });
        // By now the blocks are given back, whatever happened.
        let wanted = outbox.lock().writing.take().map(|(_, wanted)| wanted);
        match wanted {
            Some(Wanted::Cancelled) => {
                shared.report(DataEvent::SendReleased { transfer });
            }
            Some(Wanted::Yes) => {
                if let Ok((bytes, integrity)) = &written {
                    shared.counters.sent(*bytes);
                    shared.report(DataEvent::Sent { transfer, chunk, integrity: *integrity });
                }
            }
            Some(Wanted::Released) | None => {}
        }
        written?;
    }
    Ok(())
}

/// Writes one frame and gives back its blocks: bytes and xxh3-64 of the payload.
///
/// A frame that is cancelled halfway is filled up with zeros, so that the next one finds its place;
/// `on_release` is called as soon as the blocks are given back.
fn write_frame(
    outbox: &Outbox,
    stream: &mut TcpStream,
    job: Job,
    on_release: impl FnOnce(),
) -> io::Result<(u64, u64)> {
    let payload_bytes: u64 = job.blocks.iter().map(|block| block.byte_count() as u64).sum();
    let header = Header { transfer: job.transfer, chunk: job.chunk, payload_bytes }.to_bytes();
    let mut hash = Xxh3::new();
    let mut sent = 0;
    {
        let views: Vec<&[u8]> = job
            .blocks
            .iter()
            .map(BlockRead::host_view)
            .collect::<Option<_>>()
            .ok_or_else(|| io::Error::other("the blocks are not in host memory"))?;
        let mut pieces = Pieces::new(&views);
        let mut first = Some(header);
        loop {
            let piece = pieces.next();
            if piece.is_empty() && first.is_none() {
                return Ok((payload_bytes, hash.digest()));
            }
            for slice in &piece {
                hash.update(slice);
            }
            let header = first.take();
            let mut slices: Vec<IoSlice<'_>> =
                header.iter().map(|header| IoSlice::new(header)).collect();
            slices.extend(piece.iter().map(|slice| IoSlice::new(slice)));
            let bytes: usize = piece.iter().map(|slice| slice.len()).sum();
            if !write_piece(outbox, stream, &mut slices, &mut sent)? {
                break;
            }
            debug_assert!(bytes <= PIECE_BYTES);
        }
    }
    drop(job);
    if outbox.released() {
        on_release();
    }
    fill(outbox, stream, header.len() as u64 + payload_bytes - sent)?;
    Ok((payload_bytes, 0))
}

/// False when the frame was cancelled on the way.
fn write_piece(
    outbox: &Outbox,
    stream: &mut TcpStream,
    mut slices: &mut [IoSlice<'_>],
    sent: &mut u64,
) -> io::Result<bool> {
    let mut progress = Instant::now();
    while !slices.is_empty() {
        match stream.write_vectored(slices) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => {
                *sent += count as u64;
                IoSlice::advance_slices(&mut slices, count);
                progress = Instant::now();
            }
            Err(error) if is_pause(&error) => check_progress(progress)?,
            Err(error) => return Err(error),
        }
        if outbox.is_cancelled() {
            return Ok(false);
        }
    }
    Ok(true)
}

fn fill(outbox: &Outbox, stream: &mut TcpStream, mut bytes: u64) -> io::Result<()> {
    let zeros = [0; 16 << 10];
    let mut progress = Instant::now();
    while bytes > 0 {
        match stream.write(&zeros[..zeros.len().min(usize::try_from(bytes).unwrap_or(usize::MAX))])
        {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => {
                bytes -= count as u64;
                progress = Instant::now();
            }
            Err(error) if is_pause(&error) => check_progress(progress)?,
            Err(error) => return Err(error),
        }
        if outbox.is_closed() {
            return Ok(());
        }
    }
    Ok(())
}

/// A peer that takes nothing for a lease is lost, even if it still speaks.
fn check_progress(since: Instant) -> io::Result<()> {
    if since.elapsed() < LEASE {
        return Ok(());
    }
    let reason = format!("the peer took no byte for {} s", LEASE.as_secs());
    Err(io::Error::new(io::ErrorKind::TimedOut, reason))
}

/// Cuts a row of slices into pieces of bounded size.
struct Pieces<'a> {
    views: &'a [&'a [u8]],
    /// How much of the first view has gone.
    offset: usize,
}

impl<'a> Pieces<'a> {
    fn new(views: &'a [&'a [u8]]) -> Self {
        Self { views, offset: 0 }
    }

    /// Empty at the end.
    fn next(&mut self) -> Vec<&'a [u8]> {
        let (mut piece, mut bytes) = (Vec::new(), 0);
        while let Some((view, rest)) = self.views.split_first() {
            if bytes == PIECE_BYTES || piece.len() == PIECE_SLICES {
                break;
            }
            let end = view.len().min(self.offset + PIECE_BYTES - bytes);
            let slice = &view[self.offset..end];
            if !slice.is_empty() {
                piece.push(slice);
                bytes += slice.len();
            }
            if end == view.len() {
                self.views = rest;
                self.offset = 0;
            } else {
                self.offset = end;
            }
        }
        piece
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pieces_are_bounded_and_join_to_the_whole(
            lengths in prop::collection::vec(0usize..700_000, 0..40),
        ) {
            let bytes: Vec<Vec<u8>> = lengths
                .iter()
                .enumerate()
                .map(|(index, length)| vec![index as u8; *length])
                .collect();
            let views: Vec<&[u8]> = bytes.iter().map(Vec::as_slice).collect();
            let mut pieces = Pieces::new(&views);
            let mut joined = Vec::new();
            loop {
                let piece = pieces.next();
                if piece.is_empty() {
                    break;
                }
                prop_assert!(piece.len() <= PIECE_SLICES);
                prop_assert!(piece.iter().map(|slice| slice.len()).sum::<usize>() <= PIECE_BYTES);
                for slice in piece {
                    joined.extend_from_slice(slice);
                }
            }
            prop_assert_eq!(joined, bytes.concat());
        }
    }
}
