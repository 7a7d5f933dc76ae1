//! The receiving end: a listener, and one thread per proven connection that reads frames into the
//! blocks posted for them.

use std::{
    collections::{BTreeMap, HashMap},
    io::{self, IoSliceMut, Read},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use kernels::BlockWrite;
use socket2::SockRef;
use xxhash_rust::xxh3::Xxh3;

use super::{
    Shared,
    frame::{HEADER_BYTES, Header},
    handshake,
    stream::{LOOK, is_pause, read_exact_by},
};
use crate::{
    api::{Epoch, TransferId},
    config::LEASE,
    protocol::DataEvent,
    threads::Threads,
    transport::{DataError, Released},
};

/// Connections that have not proven yet who they are. Each may take a handshake's deadline.
const HANDSHAKES_MAX: usize = 32;

/// Largest frame that is read past when nobody waits for it; a larger one ends the connection.
const DRAIN_BYTES_MAX: u64 = 256 << 20;

/// What is read and hashed in one go.
const PIECE_BYTES: usize = 256 << 10;
const PIECE_SLICES: usize = 16;

/// How long an idle connection sits in one read.
const IDLE_LOOK: Duration = Duration::from_secs(1);

pub struct Inbound {
    peers: Arc<Peers>,
    address: SocketAddr,
    listener: Arc<TcpListener>,
    stop: Arc<AtomicBool>,
    acceptor: Threads,
    readers: Arc<Threads>,
}

/// One inbox for each peer that is admitted.
#[derive(Default)]
struct Peers {
    inboxes: Mutex<BTreeMap<Epoch, Arc<Inbox>>>,
}

/// What may be written by one peer.
#[derive(Default)]
struct Inbox {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    posted: HashMap<(TransferId, u32), Vec<BlockWrite>>,
    /// The transfer whose blocks the reader holds, and whether it is cancelled.
    reading: Option<(TransferId, bool)>,
    /// The connection that may write, to be interrupted. A newer one takes its place.
    stream: Option<TcpStream>,
    /// Its number, also when it has ended.
    connection: u64,
    /// A reader thread uses this inbox.
    occupied: bool,
    closed: bool,
}

impl Peers {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Epoch, Arc<Inbox>>> {
        self.inboxes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn inbox(&self, peer: Epoch) -> Option<Arc<Inbox>> {
        self.lock().get(&peer).cloned()
    }
}

impl Inbound {
    pub fn start(
        shared: Arc<Shared>,
        listener: TcpListener,
        connections_max: usize,
    ) -> io::Result<Self> {
        let inbound = Self {
            address: listener.local_addr()?,
            peers: Arc::default(),
            listener: Arc::new(listener),
            stop: Arc::default(),
            acceptor: Threads::default(),
            readers: Arc::default(),
        };
        // accept() honours the receive timeout, so that the thread looks up now and then.
        SockRef::from(&*inbound.listener).set_read_timeout(Some(IDLE_LOOK))?;
        let acceptor = Acceptor {
            shared,
            peers: Arc::clone(&inbound.peers),
            listener: Arc::clone(&inbound.listener),
            stop: Arc::clone(&inbound.stop),
            readers: Arc::clone(&inbound.readers),
            handshakes: Arc::default(),
            connections: Arc::default(),
            connections_max,
        };
        inbound.acceptor.spawn("kv-data-accept", move || acceptor.run())?;
        Ok(inbound)
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn admit(&self, peer: Epoch) {
        self.peers.lock().entry(peer).or_default();
    }

    pub fn post(
        &self,
        peer: Epoch,
        transfer: TransferId,
        chunk: u32,
        blocks: Vec<BlockWrite>,
    ) -> Result<(), DataError> {
        let inbox = self.peers.inbox(peer).ok_or(DataError::NotOpen)?;
        inbox.lock().posted.insert((transfer, chunk), blocks);
        Ok(())
    }

    pub fn cancel(&self, peer: Epoch, transfer: TransferId) -> Released {
        let Some(inbox) = self.peers.inbox(peer) else { return Released::Now };
        let mut state = inbox.lock();
        state.posted.retain(|(posted, _), _| *posted != transfer);
        match &mut state.reading {
            Some((reading, cancelled)) if *reading == transfer => {
                *cancelled = true;
                Released::Later
            }
            _ => Released::Now,
        }
    }

    pub fn dismiss(&self, peer: Epoch) {
        if let Some(inbox) = self.peers.lock().remove(&peer) {
            inbox.close();
        }
    }

    pub fn is_present(&self, peer: Epoch, connection: u64) -> bool {
        self.peers.inbox(peer).is_some_and(|inbox| inbox.lock().connection == connection)
    }

    pub fn shutdown(&self, deadline: Instant) -> Vec<String> {
        self.stop.store(true, Ordering::Release);
        // Wakes accept() at once where the system allows it; its timeout does everywhere.
        let _ = SockRef::from(&*self.listener).shutdown(Shutdown::Both);
        let close_all = || {
            for inbox in std::mem::take(&mut *self.peers.lock()).into_values() {
                inbox.close();
            }
        };
        close_all();
        let mut unfinished = self.acceptor.join_all(deadline);
        // A handshake may have ended in between.
        close_all();
        unfinished.extend(self.readers.join_all(deadline));
        unfinished
    }
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.posted.clear();
        if let Some(stream) = &state.stream {
            // Fails only when the connection is gone already.
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.changed.notify_all();
    }

    /// The reader of this connection has ended.
    fn leave(&self, connection: u64) {
        let mut state = self.lock();
        state.occupied = false;
        if state.connection == connection {
            state.stream = None;
        }
        self.changed.notify_all();
    }

    /// Makes this the connection that may write, once the one before has let go. False when it is
    /// superseded itself, or the inbox is closed.
    fn enter(&self, connection: u64, stream: &TcpStream) -> io::Result<bool> {
        let clone = stream.try_clone()?;
        let mut state = self.lock();
        if let Some(before) = state.stream.replace(clone) {
            let _ = before.shutdown(Shutdown::Both);
        }
        state.connection = connection;
        let deadline = Instant::now() + LEASE;
        while state.occupied && state.connection == connection && !state.closed {
            let rest = deadline.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                state.stream = None;
                return Ok(false);
            }
            (state, _) =
                self.changed.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner);
        }
        if state.connection != connection || state.closed {
            return Ok(false);
        }
        state.occupied = true;
        Ok(true)
    }

    /// The blocks posted for this frame.
    fn take(&self, header: &Header) -> Option<Vec<BlockWrite>> {
        let mut state = self.lock();
        let blocks = state.posted.remove(&(header.transfer, header.chunk))?;
        state.reading = Some((header.transfer, false));
        Some(blocks)
    }

    fn is_cancelled(&self) -> bool {
        let state = self.lock();
        state.closed || matches!(state.reading, Some((_, true)))
    }

    /// The reader has given back its blocks; true when the transfer was cancelled meanwhile.
    fn give_back(&self) -> bool {
        self.lock().reading.take().is_some_and(|(_, cancelled)| cancelled)
    }

    fn is_closed(&self) -> bool {
        self.lock().closed
    }
}

struct Acceptor {
    shared: Arc<Shared>,
    peers: Arc<Peers>,
    listener: Arc<TcpListener>,
    stop: Arc<AtomicBool>,
    readers: Arc<Threads>,
    handshakes: Arc<AtomicUsize>,
    connections: Arc<AtomicUsize>,
    connections_max: usize,
}

/// Counts one of a bounded number until it is dropped.
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(counter: &Arc<AtomicUsize>, max: usize) -> Option<Self> {
        counter
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |taken| {
                (taken < max).then_some(taken + 1)
            })
            .is_ok()
            .then(|| Self(Arc::clone(counter)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Acceptor {
    fn run(self) {
        while !self.stop.load(Ordering::Acquire) {
            match self.listener.accept() {
                Ok((stream, _)) => self.admit(stream),
                Err(error) if is_pause(&error) => {}
                Err(error) => {
                    if !self.stop.load(Ordering::Acquire) {
                        tracing::warn!(%error, "no data connection could be accepted");
                        // Out of descriptors, most likely: give others time to end.
                        thread::sleep(LOOK);
                    }
                }
            }
        }
    }

    fn admit(&self, stream: TcpStream) {
        let Some(place) = Place::take(&self.handshakes, HANDSHAKES_MAX) else {
            return self.shared.counters.refuse("handshakes_full");
        };
        let (shared, peers) = (Arc::clone(&self.shared), Arc::clone(&self.peers));
        let (connections, connections_max) = (Arc::clone(&self.connections), self.connections_max);
        let reader = move || {
            let mut stream = stream;
            // Fails only when the connection is gone, which the handshake finds out.
            let _ = stream.set_nodelay(true);
            match handshake::accept(&mut stream, &shared.keys, shared.me) {
                Ok(peer) => {
                    drop(place);
                    match Place::take(&connections, connections_max) {
                        Some(_place) => read_connection(&shared, &peers, peer, stream),
                        None => shared.counters.refuse("connections_full"),
                    }
                }
                Err(error) => {
                    tracing::debug!(%error, "a data connection was refused");
                    shared.counters.refuse(error.label());
                }
            }
        };
        if let Err(error) = self.readers.spawn("kv-data-in", reader) {
            tracing::warn!(%error, "no thread for a data connection");
            self.shared.counters.refuse("no_thread");
        }
    }
}

fn read_connection(shared: &Shared, peers: &Peers, peer: Epoch, mut stream: TcpStream) {
    let Some(inbox) = peers.inbox(peer) else {
        return shared.counters.refuse("peer_not_admitted");
    };
    let connection = shared.number_connection();
    match inbox.enter(connection, &stream) {
        Ok(true) => {}
        Ok(false) => return,
        Err(error) => return tracing::warn!(%error, "a data connection could not be used"),
    }
    let ended = read_frames(shared, &inbox, &mut stream);
    let reason = match ended {
        Ok(()) => "it closed the data connection".to_owned(),
        Err(error) => format!("data connection from it: {error}"),
    };
    inbox.leave(connection);
    // The driver, which knows what it has closed meanwhile, finds out whether this one mattered.
    shared.report_end(peer, connection, reason);
}

/// Until the peer closes between two frames, or something breaks.
fn read_frames(shared: &Shared, inbox: &Inbox, stream: &mut TcpStream) -> io::Result<()> {
    while let Some(header) = read_header(inbox, stream)? {
        let Some(blocks) = inbox.take(&header) else {
            // Cancelled here while it was on its way.
            shared.counters.refuse("frame_not_posted");
            if header.payload_bytes > DRAIN_BYTES_MAX {
                let reason = format!("a frame of {} bytes for nobody", header.payload_bytes);
                return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
            }
            drain(inbox, stream, header.payload_bytes)?;
            continue;
        };
        let transfer = header.transfer;
        // The blocks are given back inside, whatever happens.
        let read = read_payload(inbox, stream, &header, blocks);
        let cancelled = inbox.give_back();
        let event = match &read {
            _ if cancelled => DataEvent::ReceiveReleased { transfer },
            Ok(Payload::Whole { integrity }) => {
                shared.counters.received(header.payload_bytes);
                DataEvent::Received { transfer, chunk: header.chunk, integrity: *integrity }
            }
            Ok(Payload::Cut { .. }) => {
                DataEvent::Failed { transfer, reason: "the data connection was closed".to_owned() }
            }
            Err(error) => {
                DataEvent::Failed { transfer, reason: format!("chunk {}: {error}", header.chunk) }
            }
        };
        shared.report(event);
        if let Payload::Cut { rest } = read? {
            drain(inbox, stream, rest)?;
        }
    }
    Ok(())
}

/// `None` when the connection ends here, where it may.
fn read_header(inbox: &Inbox, stream: &mut TcpStream) -> io::Result<Option<Header>> {
    let mut bytes = [0; HEADER_BYTES];
    stream.set_read_timeout(Some(IDLE_LOOK))?;
    let first = loop {
        match stream.read(&mut bytes) {
            Ok(0) => return Ok(None),
            Ok(count) => break count,
            Err(error) if is_pause(&error) => {
                if inbox.is_closed() {
                    return Ok(None);
                }
            }
            Err(error) => return Err(error),
        }
    };
    read_exact_by(stream, &mut bytes[first..], Instant::now() + LEASE)?;
    stream.set_read_timeout(Some(LOOK))?;
    match Header::from_bytes(&bytes) {
        Some(header) => Ok(Some(header)),
        None => Err(io::Error::new(io::ErrorKind::InvalidData, "no frame begins where one should")),
    }
}

enum Payload {
    Whole {
        integrity: u64,
    },
    /// Cancelled: the blocks are given back, and so much of the frame is still to come.
    Cut {
        rest: u64,
    },
}

fn read_payload(
    inbox: &Inbox,
    stream: &mut TcpStream,
    header: &Header,
    mut blocks: Vec<BlockWrite>,
) -> io::Result<Payload> {
    let posted_bytes: u64 = blocks.iter().map(|block| block.byte_count() as u64).sum();
    if posted_bytes != header.payload_bytes {
        let reason = format!("{} bytes where {posted_bytes} were posted", header.payload_bytes);
        return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    }
    let mut views: Vec<&mut [u8]> = blocks
        .iter_mut()
        .map(BlockWrite::host_view_mut)
        .collect::<Option<_>>()
        .ok_or_else(|| io::Error::other("the blocks are not in host memory"))?;
    let mut hash = Xxh3::new();
    let (mut index, mut offset, mut rest) = (0, 0, header.payload_bytes);
    let mut progress = Instant::now();
    while rest > 0 {
        if inbox.is_cancelled() {
            return Ok(Payload::Cut { rest });
        }
        let mut count = match read_piece(stream, &mut views[index..], offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => count,
            Err(error) if is_pause(&error) => {
                check_progress(progress)?;
                continue;
            }
            Err(error) => return Err(error),
        };
        progress = Instant::now();
        rest -= count as u64;
        // What has just come is still in the cache.
        while count > 0 {
            let end = views[index].len().min(offset + count);
            hash.update(&views[index][offset..end]);
            count -= end - offset;
            if end == views[index].len() {
                (index, offset) = (index + 1, 0);
            } else {
                offset = end;
            }
        }
    }
    Ok(Payload::Whole { integrity: hash.digest() })
}

fn read_piece(stream: &mut TcpStream, views: &mut [&mut [u8]], offset: usize) -> io::Result<usize> {
    let mut slices = Vec::with_capacity(PIECE_SLICES.min(views.len()));
    let (mut begin, mut bytes) = (offset, 0);
    for view in views.iter_mut().take(PIECE_SLICES) {
        let end = view.len().min(begin + PIECE_BYTES - bytes);
        bytes += end - begin;
        slices.push(IoSliceMut::new(&mut view[begin..end]));
        begin = 0;
        if bytes == PIECE_BYTES {
            break;
        }
    }
    stream.read_vectored(&mut slices)
}

/// Reads past what nobody wants any more.
fn drain(inbox: &Inbox, stream: &mut TcpStream, mut bytes: u64) -> io::Result<()> {
    let mut scratch = vec![0; 64 << 10];
    let mut progress = Instant::now();
    while bytes > 0 {
        let most = scratch.len().min(usize::try_from(bytes).unwrap_or(usize::MAX));
        match stream.read(&mut scratch[..most]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                bytes -= count as u64;
                progress = Instant::now();
            }
            Err(error) if is_pause(&error) => check_progress(progress)?,
            Err(error) => return Err(error),
        }
        if inbox.is_closed() {
            break;
        }
    }
    Ok(())
}

/// A peer that begins a frame and does not go on for a lease is lost, even if it still speaks.
fn check_progress(since: Instant) -> io::Result<()> {
    if since.elapsed() < LEASE {
        return Ok(());
    }
    let reason = format!("no byte came for {} s within a frame", LEASE.as_secs());
    Err(io::Error::new(io::ErrorKind::TimedOut, reason))
}
