mod integrity;

use std::{
    io::{Read, Write},
    net::TcpListener,
    os::unix::net::UnixListener,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use engine::executor::{DeclaredTensor, TensorPiece};
use kernels::cuda::{ChunkSource, HANDLE_BYTES};
use model::Checkpoint;
use serde_json::{Value, json};
use tokio::task::spawn_blocking;
use weight_transfer::Plan;

use super::{
    connection::{CANCEL_POLL_INTERVAL, TrainerConnection},
    *,
};
use crate::weights::receive::ReceiveError;

/// Bytes of a broadcast chunk.
const CHUNK_BYTES: usize = 100;
const SIZES: [u64; 4] = [700, 0, 1, 1299];

/// Memory that a trainer and a node share: the chunk buffers, and what the node has received.
#[derive(Default)]
struct Shared {
    buffers: Mutex<Vec<Vec<u8>>>,
    received: Mutex<Vec<Vec<u8>>>,
    /// Receivers that exist.
    receiving: AtomicUsize,
    is_in_place: bool,
    /// The chunk whose broadcast does not end.
    stuck_at: Option<usize>,
    /// The chunk whose broadcast arrives with another byte.
    damaged_at: Option<usize>,
    /// Whether the last copies end after the trainer has closed the connection.
    outlives_trainer: bool,
    /// Calls that end a kept communicator.
    left: AtomicUsize,
}

impl Shared {
    /// Checks, when a node has closed its connection, that no copies are in flight.
    fn assert_unmapped(&self) {
        assert_eq!(self.receiving.load(Ordering::Relaxed), 0, "the connection closes last");
    }
}

/// Reads a buffer as late as it may, so that an early overwrite shows.
struct Receiver<'a> {
    shared: &'a Shared,
    pending: Vec<Vec<TensorPiece>>,
    /// Chunks that were broadcast, and their bytes.
    filled: (usize, usize),
    has_waited: bool,
}

impl WeightUpdate for Shared {
    fn is_in_place(&self) -> bool {
        self.is_in_place
    }

    fn prepare(&self, _: &Path, _: &Checkpoint) -> Result<(), PrepareError> {
        unreachable!("the tests read no files")
    }

    fn receive(
        &self,
        tensors: &[DeclaredTensor],
        source: ChunkSource<'_>,
    ) -> Result<Box<dyn ChunkReceiver + '_>, PrepareError> {
        let buffers = match source {
            ChunkSource::Mapped(buffers) => buffers.len(),
            ChunkSource::Broadcast { buffers, .. } => buffers,
        };
        *self.buffers.lock().unwrap() = vec![Vec::new(); buffers];
        let bytes = tensors.iter().map(|it| vec![0; it.bytes().unwrap() as usize]);
        *self.received.lock().unwrap() = bytes.collect();
        self.receiving.fetch_add(1, Ordering::Relaxed);
        let pending = vec![Vec::new(); buffers];
        Ok(Box::new(Receiver { shared: self, pending, filled: (0, 0), has_waited: false }))
    }

    fn leave_trainer(&self) {
        self.left.fetch_add(1, Ordering::Relaxed);
    }

    fn discard(&self) {}
}

impl ChunkReceiver for Receiver<'_> {
    fn scatter(&mut self, buffer: usize, pieces: &[TensorPiece]) -> Result<(), PrepareError> {
        assert!(self.pending[buffer].is_empty(), "the node waits before it reuses a buffer");
        self.pending[buffer] = pieces.to_vec();
        Ok(())
    }

    /// Puts the next chunk of the weights into a buffer, as a broadcast does.
    fn fill(
        &mut self,
        buffer: usize,
        bytes: usize,
        limit: WaitLimit<'_>,
    ) -> Result<(), PrepareError> {
        assert!(self.pending[buffer].is_empty(), "the node waits before it reuses a buffer");
        let (chunks, begin) = self.filled;
        if self.shared.stuck_at == Some(chunks) {
            while !(limit.cancelled)() && Instant::now() < limit.deadline {
                thread::yield_now();
            }
            return Err(PrepareError::Device("the broadcast was aborted".to_owned()));
        }
        let mut chunk = weights().concat()[begin..begin + bytes].to_vec();
        chunk[0] ^= u8::from(self.shared.damaged_at == Some(chunks));
        self.shared.buffers.lock().unwrap()[buffer] = chunk;
        self.filled = (chunks + 1, begin + bytes);
        Ok(())
    }

    fn wait(&mut self, buffer: usize, limit: WaitLimit<'_>) -> Result<(), PrepareError> {
        if self.filled.0 > 0 && !self.has_waited {
            let left = limit.deadline - Instant::now();
            assert!(left > CHUNK_MAX, "the first broadcast begins once all nodes are ready");
        }
        self.has_waited = true;
        let buffers = self.shared.buffers.lock().unwrap();
        let mut received = self.shared.received.lock().unwrap();
        for TensorPiece { tensor, range, at } in self.pending[buffer].drain(..) {
            let bytes = &buffers[buffer][at..at + range.len()];
            received[tensor][range].copy_from_slice(bytes);
        }
        Ok(())
    }

    fn finish(&mut self, limit: WaitLimit<'_>) -> Result<ReceivedWeights, PrepareError> {
        (0..self.pending.len()).try_for_each(|buffer| self.wait(buffer, limit))?;
        while self.shared.outlives_trainer && !(limit.cancelled)() {
            assert!(Instant::now() < limit.deadline, "the trainer closes the connection");
            thread::yield_now();
        }
        let received = self.shared.received.lock().unwrap();
        let digest =
            |bytes: &Vec<u8>| Some(TensorDigest { value: digest_of(bytes), is_whole: true });
        let bytes = received.iter().map(|bytes| bytes.len() as u64).sum();
        Ok(ReceivedWeights { digests: received.iter().map(digest).collect(), bytes })
    }
}

impl Drop for Receiver<'_> {
    fn drop(&mut self) {
        // Copies in flight take a moment, in which a connection that was closed too early shows.
        thread::sleep(Duration::from_millis(2));
        self.shared.receiving.fetch_sub(1, Ordering::Relaxed);
    }
}

fn declaration(chunk_bytes: usize, buffers: usize) -> Value {
    let tensors = SIZES.iter().enumerate().map(
        |(index, bytes)| json!({"name": format!("t{index}"), "dtype": "BF16", "shape": [bytes]}),
    );
    let buffer = json!({"gpu": "GPU-1", "handle": "0a".repeat(HANDLE_BYTES)});
    json!({
        "chunk_bytes": chunk_bytes,
        "plan": plan_hash(chunk_bytes),
        "mapped": vec![buffer; buffers],
        "tensors": tensors.collect::<Vec<_>>(),
    })
}

fn plan_hash(chunk_bytes: usize) -> String {
    let tensor = |(index, size): (usize, &u64)| Tensor {
        name: format!("t{index}"),
        dtype: "BF16".to_owned(),
        shape: vec![*size],
        bytes: 2 * size,
    };
    let tensors = SIZES.iter().enumerate().map(tensor).collect();
    format!("{:032x}", Plan::new(tensors, chunk_bytes as u64).unwrap().trainer_hash())
}

fn digest_of(bytes: &[u8]) -> u64 {
    weight_transfer::ChunkDigest::default().update(bytes).finish() as u64
}

/// Returns the digests that the trainer sends.
fn digests() -> Vec<u8> {
    weights().iter().flat_map(|bytes| digest_of(bytes).to_le_bytes()).collect()
}

fn weights() -> Vec<Vec<u8>> {
    let bytes = |(tensor, size): (usize, &u64)| {
        (0..2 * *size as usize).map(|at| (at * 7 + tensor) as u8).collect()
    };
    SIZES.iter().enumerate().map(bytes).collect()
}

/// Behaviour of the trainer after it has answered some requests.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Closes,
    StaysSilent,
    Miscounts,
    Corrupts,
}

/// Serves one node, as a trainer does. Ends after `answers` requests.
fn train(
    listener: UnixListener,
    shared: Arc<Shared>,
    declaration: Value,
    answers: usize,
    end: End,
) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let text = format!("{declaration}\n");
        // The node may have found the first bytes invalid.
        let _ = stream.write_all(text.as_bytes());
        let all = weights().concat();
        let chunk_bytes = declaration["chunk_bytes"].as_u64().unwrap_or(1).max(1) as usize;
        let chunks: Vec<_> = all.chunks(chunk_bytes).collect();
        for answer in 0.. {
            if answer == answers {
                match end {
                    End::Closes => return,
                    End::StaysSilent => {
                        let _ = stream.read_exact(&mut [0; 4096]);
                        return shared.assert_unmapped();
                    }
                    End::Miscounts | End::Corrupts => {}
                }
            }
            let mut request = [0; 8];
            if stream.read_exact(&mut request).is_err() {
                return shared.assert_unmapped();
            }
            let index = u64::from_le_bytes(request);
            if index == DIGESTS {
                // The node may have closed the connection.
                let _ = stream.write_all(&digests());
                continue;
            }
            let index = index as usize;
            let mut buffers = shared.buffers.lock().unwrap();
            let buffer = index % buffers.len();
            buffers[buffer] = chunks[index].to_vec();
            buffers[buffer][0] ^= u8::from(answer == answers && end == End::Corrupts);
            drop(buffers);
            let is_wrong = answer == answers && end == End::Miscounts;
            let bytes = chunks[index].len() + usize::from(is_wrong);
            let answer = [index as u64, bytes as u64].map(u64::to_le_bytes).concat();
            if stream.write_all(&answer).is_err() {
                return shared.assert_unmapped();
            }
        }
    })
}

struct Outcome {
    shared: Arc<Shared>,
    result: Result<WeightVersion, ReceiveError>,
    released: bool,
}

/// Runs a trainer and a node.
async fn run(declaration: Value, answers: usize, end: End, is_in_place: bool) -> Outcome {
    let shared = Shared { is_in_place, ..Shared::default() };
    run_with(shared, declaration, answers, end).await
}

async fn run_with(shared: Shared, declaration: Value, answers: usize, end: End) -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("trainer.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let shared = Arc::new(shared);
    let trainer = train(listener, shared.clone(), declaration, answers, end);
    let cancelled = CancellationToken::new();
    if matches!(end, End::StaysSilent) {
        let cancelled = cancelled.clone();
        tokio::spawn(async move {
            tokio::time::sleep(CANCEL_POLL_INTERVAL).await;
            cancelled.cancel();
        });
    }
    let node = shared.clone();
    let (result, released) = spawn_blocking(move || {
        let released = std::cell::Cell::new(false);
        let release = || {
            released.set(true);
            Ok(())
        };
        let result = receive(
            &TrainerAddress::Ipc(socket),
            &KeptTrainer::default(),
            &*node,
            &release,
            &|| true,
            &cancelled,
        );
        (result, released.get())
    })
    .await
    .unwrap();
    trainer.join().unwrap();
    assert_eq!(shared.receiving.load(Ordering::Relaxed), 0, "the buffers are unmapped");
    Outcome { shared, result, released }
}

#[test]
fn copies_beside_serving_begin_at_a_bounded_rate() {
    let chunk = SERVING_RATE as u64 / 500;
    let rest = |elapsed_us| rest_of_copy(chunk, Duration::from_micros(elapsed_us)).as_micros();
    assert_eq!([rest(0), rest(500), rest(2000), rest(9000)], [2000, 1500, 0, 0]);
}

#[tokio::test]
async fn every_byte_arrives_for_any_number_of_buffers_and_chunks() {
    let mut versions = Vec::new();
    for buffers in [1, 2, 3, 8] {
        for chunk_bytes in [100, 333, 1400, 5000] {
            let outcome =
                run(declaration(chunk_bytes, buffers), usize::MAX, End::Closes, false).await;
            versions.push(outcome.result.unwrap());
            assert!(!outcome.released);
            assert_eq!(*outcome.shared.received.lock().unwrap(), weights());
        }
    }
    versions.dedup();
    assert_eq!(versions.len(), 1, "the version depends on the bytes only");
}

#[tokio::test]
async fn trainer_that_ends_at_any_chunk_aborts_the_update() {
    // 40 chunks.
    for answers in 0..40 {
        for is_in_place in [false, true] {
            let outcome = run(declaration(100, 2), answers, End::Closes, is_in_place).await;
            let error = outcome.result.unwrap_err().to_string();
            assert!(error.contains("the trainer closed the connection"), "{answers}: {error}");
            assert_eq!(outcome.released, is_in_place);
        }
    }
    // After the last chunk: it may have freed its memory before the copies.
    let shared = Shared { outlives_trainer: true, ..Shared::default() };
    let outcome = run_with(shared, declaration(100, 2), 40, End::Closes).await;
    let error = outcome.result.unwrap_err().to_string();
    assert!(error.contains("the trainer closed the connection"), "{error}");
}

#[tokio::test]
async fn trainer_that_sends_single_bytes_does_not_prolong_the_time_out() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("trainer.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let trainer = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        // The connection closes after 2 s, which is another error.
        for _ in 0..400 {
            if stream.write_all(b" ").is_err() {
                return;
            }
            thread::sleep(CANCEL_POLL_INTERVAL / 4);
        }
    });
    let read = spawn_blocking(move || {
        let cancelled = CancellationToken::new();
        let mut connection = TrainerConnection::open(&TrainerAddress::Ipc(socket), &cancelled)?;
        connection.line::<Value>(CANCEL_POLL_INTERVAL)
    });
    let error = read.await.unwrap().unwrap_err().to_string();
    assert!(error.contains("no answer within 20ms"), "{error}");
    trainer.join().unwrap();
}

#[tokio::test]
async fn cancelled_update_leaves_a_silent_trainer() {
    for answers in [0, 3] {
        let outcome = run(declaration(100, 2), answers, End::StaysSilent, false).await;
        assert!(matches!(outcome.result, Err(ReceiveError::Cancelled)));
    }
}

#[tokio::test]
async fn invalid_messages_are_named() {
    let with = |field: &str, value: Value| {
        let mut declaration = declaration(100, 2);
        declaration[field] = value;
        declaration
    };
    let buffer = |handle: &str| json!([{"gpu": "GPU-1", "handle": handle}]);
    for (declaration, words) in [
        (with("chunk_bytes", json!(0)), "chunk_bytes is 0; expected 1 to"),
        (with("chunk_bytes", json!("big")), "invalid type: string"),
        (with("plan", json!("0a0")), "plan is \"0a0\"; expected 32 hexadecimal digits"),
        (with("mapped", json!([])), "0 buffers; expected 1 to 16"),
        (with("mapped", buffer("0a0")), "handle is \"0a0\"; expected 128 hexadecimal digits"),
        (with("mapped", buffer(&"é".repeat(64))), "expected 128 hexadecimal digits"),
        (with("tensors", json!([])), "expected at least one tensor"),
        (
            with("tensors", json!([{"name": "t0", "dtype": "F16", "shape": [4]}])),
            "tensor \"t0\" has dtype F16 and shape [4]; expected BF16 or F32",
        ),
        (with("colour", json!("red")), "unknown field `colour`"),
        (json!("a text"), "invalid type"),
    ] {
        let outcome = run(declaration, 0, End::Closes, true).await;
        let error = outcome.result.unwrap_err().to_string();
        assert!(error.contains(words), "{error:?} lacks {words:?}");
        assert!(!outcome.released, "{words}: an invalid message costs no weights");
    }
    let outcome = run(declaration(100, 2), 3, End::Miscounts, false).await;
    let error = outcome.result.unwrap_err().to_string();
    assert!(error.contains("101 bytes as chunk 3; expected 100 bytes as chunk 3"), "{error}");
    let nobody = spawn_blocking(|| {
        let shared = Shared::default();
        let address = TrainerAddress::Ipc("/nowhere/trainer.sock".into());
        receive(
            &address,
            &KeptTrainer::default(),
            &shared,
            &|| Ok(()),
            &|| false,
            &CancellationToken::new(),
        )
    });
    let error = nobody.await.unwrap().unwrap_err().to_string();
    assert!(error.contains("expected the Unix socket of a trainer on this host"), "{error}");
}

fn broadcast(buffers: usize, chunk_bytes: usize) -> Value {
    let mut declaration = declaration(chunk_bytes, 0);
    declaration["broadcast"] = json!({
        "gpu": "GPU-1", "id": "0b".repeat(128), "rank": 1, "ranks": 2, "buffers": buffers,
        "max_ctas": null
    });
    declaration
}

/// Runs a node and a trainer that broadcasts. The trainer leaves at once if a broadcast is stuck,
/// and otherwise when the node has left.
async fn run_broadcast(
    declaration: Value,
    shared: Shared,
) -> (Arc<Shared>, Result<WeightVersion, ReceiveError>) {
    let is_stuck = shared.stuck_at.is_some();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let text = format!("{}/secret", listener.local_addr().unwrap());
    let address = TrainerAddress::nccl(&text).unwrap();
    let trainer = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut token = [0; 6];
        stream.read_exact(&mut token).unwrap();
        assert_eq!(&token, b"secret");
        stream.write_all(format!("{declaration}\n").as_bytes()).unwrap();
        // The node rejects an invalid declaration.
        let is_ready = stream.read_exact(&mut [0; 8]).is_ok();
        if is_ready && !is_stuck {
            stream.write_all(&digests()).unwrap();
            assert_eq!(stream.read(&mut [0]).unwrap(), 0, "the node has received everything");
        }
    });
    let shared = Arc::new(shared);
    let node = shared.clone();
    let received = spawn_blocking(move || {
        receive(
            &address,
            &KeptTrainer::default(),
            &*node,
            &|| Ok(()),
            &|| false,
            &CancellationToken::new(),
        )
    });
    let received = received.await.unwrap();
    trainer.join().unwrap();
    assert_eq!(shared.receiving.load(Ordering::Relaxed), 0);
    (shared, received)
}

#[tokio::test]
async fn broadcast_chunks_arrive_and_give_the_version_of_other_transports() {
    let mapped = run(declaration(333, 2), usize::MAX, End::Closes, false).await.result.unwrap();
    // The last ones have fewer chunks than buffers.
    for (buffers, chunk_bytes) in [(1, 100), (2, 100), (3, 100), (8, 100), (4, 1999), (2, 9999)] {
        let declaration = broadcast(buffers, chunk_bytes);
        let (shared, version) = run_broadcast(declaration, Shared::default()).await;
        assert_eq!(version.unwrap(), mapped);
        assert_eq!(*shared.received.lock().unwrap(), weights());
    }
}

#[tokio::test]
async fn node_keeps_a_trainer_until_it_leaves_or_another_one_comes() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = TrainerAddress::nccl(&format!("{}/secret", listener.local_addr().unwrap()));
    let address = address.unwrap();
    let (leave, leaves) = std::sync::mpsc::channel();
    // Three updates by the first connection, and two by others.
    let trainer = thread::spawn(move || {
        for updates in [3, 1, 1] {
            let (mut stream, _) = listener.accept().unwrap();
            for _ in 0..updates {
                stream.read_exact(&mut [0; 6]).unwrap();
                stream.write_all(format!("{}\n", broadcast(2, 100)).as_bytes()).unwrap();
                stream.read_exact(&mut [0; 8]).unwrap();
                stream.write_all(&digests()).unwrap();
            }
            match updates {
                1 => assert_eq!(stream.read(&mut [0]).unwrap(), 0, "the node has left"),
                _ => leaves.recv().unwrap(),
            }
        }
    });
    let (shared, kept) = (Arc::new(Shared::default()), Arc::new(KeptTrainer::default()));
    let (node, trainers) = (shared.clone(), kept.clone());
    let left = move || node.left.load(Ordering::Relaxed);
    let node = shared.clone();
    let received = spawn_blocking(move || {
        let update = |address: &TrainerAddress| {
            receive(address, &trainers, &*node, &|| Ok(()), &|| false, &CancellationToken::new())
        };
        for _ in 0..3 {
            update(&address).unwrap();
        }
        assert_eq!(left(), 1, "before the first update");
        assert!(!trainers.close_if_left());
        leave.send(()).unwrap();
        let deadline = Instant::now() + JOIN_MAX;
        while !trainers.close_if_left() {
            assert!(!trainers.is_empty() && Instant::now() < deadline, "the trainer leaves");
            thread::yield_now();
        }
        update(&address).unwrap();
        assert!(!trainers.is_empty() && !trainers.close_if_left());
        let TrainerAddress::Nccl { host, .. } = &address else { unreachable!("by nccl") };
        let other = TrainerAddress::nccl(&format!("{host}/others")).unwrap();
        update(&other).unwrap();
        assert_eq!(left(), 3, "before every update of a new connection");
    });
    received.await.unwrap();
    drop(kept);
    trainer.join().unwrap();
}

#[tokio::test]
async fn trainer_that_leaves_during_a_broadcast_aborts_the_update() {
    for chunk in [0, 1, 20, 39] {
        let shared = Shared { stuck_at: Some(chunk), ..Shared::default() };
        let (_, result) = run_broadcast(broadcast(2, CHUNK_BYTES), shared).await;
        let error = result.unwrap_err().to_string();
        assert!(error.contains("the trainer closed the connection"), "{chunk}: {error}");
    }
}

#[tokio::test]
async fn invalid_broadcasts_and_addresses_are_named() {
    let with = |field: &str, value: Value| {
        let mut declaration = broadcast(2, CHUNK_BYTES);
        declaration["broadcast"][field] = value;
        declaration
    };
    for (declaration, words) in [
        (declaration(100, 2), "missing field broadcast"),
        (with("rank", json!(0)), "rank is 0 of 2; expected 1 to ranks - 1"),
        (with("rank", json!(2)), "rank is 2 of 2; expected 1 to ranks - 1"),
        (with("buffers", json!(0)), "0 buffers; expected 1 to 16"),
        (with("id", json!("0b")), "id is \"0b\"; expected 256 hexadecimal digits"),
    ] {
        let (_, result) = run_broadcast(declaration, Shared::default()).await;
        let error = result.unwrap_err().to_string();
        assert!(error.contains(words), "{error:?} lacks {words:?}");
    }
    let outcome = run(broadcast(2, CHUNK_BYTES), 0, End::Closes, false).await;
    let error = outcome.result.unwrap_err().to_string();
    assert!(error.contains("it has the field broadcast; expected mapped"), "{error}");
    let address = TrainerAddress::nccl("10.0.0.7:5000/secret").unwrap();
    assert_eq!(format!("{address} {address:?}"), "10.0.0.7:5000 10.0.0.7:5000", "logs show it");
}
