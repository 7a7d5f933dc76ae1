//! NCCL communicators between two processes: transfers preserve data, an absent rank causes a
//! time-out, and a dead peer's communicator can be aborted.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kernels::{
    Dtype,
    cuda::{
        Communicator, CommunicatorOptions, Compute, DeviceMemory, HostToDevice, Nccl, NcclError,
        Piece, Range, SendOrReceive, Stream, UniqueId,
    },
};

use super::ranks::{Rank, on_ranks};

const TIMEOUT: Duration = Duration::from_secs(60);

fn nccl() -> Arc<Nccl> {
    let path = std::env::var_os("BATON_TEST_NCCL").map(std::path::PathBuf::from);
    Nccl::open(path.as_deref()).unwrap()
}

fn options(rank: &Rank, id: UniqueId) -> CommunicatorOptions {
    let ctas = Some((1, 8));
    CommunicatorOptions { rank: rank.rank as u32, ranks: rank.ranks as u32, id, ctas }
}

/// Returns the communicator of a rank. Rank 0 creates the id.
fn connected(rank: &Rank, nccl: &Arc<Nccl>) -> Communicator {
    let id = if rank.rank == 0 { nccl.unique_id().unwrap().0.to_vec() } else { Vec::new() };
    let id = UniqueId(rank.exchange(&id)[0].clone().try_into().unwrap());
    Communicator::new(nccl, &rank.context, options(rank, id), Instant::now() + TIMEOUT).unwrap()
}

fn memory(rank: &Rank, bytes: usize) -> Range {
    DeviceMemory::new(&rank.context, "a test", bytes).unwrap().cut(bytes).unwrap()
}

fn pattern(seed: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|index| (index * 31 + index / 251 + seed * 97) as u8).collect()
}

pub(crate) fn two_ranks_send_receive_and_all_reduce() {
    on_ranks("nccl::two_ranks_send_receive_and_all_reduce", 2, |rank| {
        let nccl = nccl();
        for turn in ["first", "second"] {
            let begin = Instant::now();
            Communicator::load_kernels(&nccl, &rank.context, begin + TIMEOUT).unwrap();
            println!("a {turn} load of its kernels took {:?}", begin.elapsed());
        }
        rank.barrier();
        let begin = Instant::now();
        let mut communicator = connected(&rank, &nccl);
        let (took, bytes) = (begin.elapsed(), communicator.memory_bytes());
        println!("NCCL {} of {}", nccl.version(), nccl.path().display());
        println!("a communicator of 8 blocks took {took:?}, {} MiB", bytes >> 20);
        let stream: Stream<HostToDevice> = Stream::new(&rank.context).unwrap();
        let (peer, size) = (1 - rank.rank as u32, 3 << 20);
        let (from, to) = (memory(&rank, size), memory(&rank, size));
        from.write(0, &pattern(rank.rank, size)).unwrap();
        let mut sequence = 0;
        // Pieces of odd sizes at odd offsets, each in a group with others.
        for (at, bytes) in [(0, 1), (17, 65_535), (1 << 20, 1 << 20), (100, 0), (0, size)] {
            to.fill(0xee, &stream).unwrap();
            let (mine, theirs) = (Piece::new(&from, at, bytes), Piece::new(&to, at, bytes));
            let (send, receive) =
                (SendOrReceive { peer, piece: mine }, SendOrReceive { peer, piece: theirs });
            let again = Piece::new(&to, at / 2, 0);
            let done = communicator.exchange(
                &[send, SendOrReceive { peer, piece: Piece::new(&from, 0, 0) }],
                &[receive, SendOrReceive { peer, piece: again }],
                &stream,
                Instant::now() + TIMEOUT,
            );
            sequence += 1;
            assert_eq!(done, Ok(sequence));
            stream.synchronize().unwrap();
            let mut found = vec![0; size];
            to.read(0, &mut found).unwrap();
            let sent = pattern(1 - rank.rank, size);
            assert!(found[at..at + bytes] == sent[at..at + bytes], "{bytes} bytes at {at}");
            let around = found[..at].iter().chain(&found[at + bytes..]);
            assert!(around.copied().all(|byte| byte == 0xee), "{bytes} bytes at {at} alone");
        }
        let compute: Stream<Compute> = Stream::new(&rank.context).unwrap();
        let numbers: Vec<f32> = (0..1000).map(|index| (index * (rank.rank + 1)) as f32).collect();
        from.write(0, &numbers).unwrap();
        let piece = Piece::new(&from, 0, 4000);
        let deadline = Instant::now() + TIMEOUT;
        communicator.all_reduce(piece, piece, Dtype::F32, &compute, deadline).unwrap();
        compute.synchronize().unwrap();
        let mut found = vec![0.0f32; 1000];
        from.read(0, &mut found).unwrap();
        assert!(found.iter().enumerate().all(|(index, sum)| *sum == (index * 3) as f32));
        let own = SendOrReceive { peer: rank.rank as u32, piece };
        let error = communicator.exchange(&[own], &[], &stream, deadline).unwrap_err();
        assert!(matches!(error, NcclError::Peer { .. }), "{error}");
        assert_eq!(communicator.sequence(), 6);
        rank.barrier();
        println!(
            "an abort of an idle communicator took {:?}",
            communicator.abort(TIMEOUT).unwrap()
        );
    });
}

pub(crate) fn absent_rank_times_out() {
    on_ranks("nccl::absent_rank_times_out", 2, |rank| {
        if rank.rank == 0 {
            let nccl = nccl();
            let id = nccl.unique_id().unwrap();
            let begin = Instant::now();
            let deadline = begin + Duration::from_secs(3);
            let error = Communicator::new(&nccl, &rank.context, options(&rank, id), deadline);
            let error = error.unwrap_err();
            assert!(matches!(error, NcclError::TimedOut { .. }), "{error}");
            assert!(begin.elapsed() < TIMEOUT, "{:?}", begin.elapsed());
            println!("time-out after {:?}: {error}", begin.elapsed());
            let mut wrong = options(&rank, id);
            wrong.rank = 2;
            let refused = Communicator::new(&nccl, &rank.context, wrong, deadline).unwrap_err();
            assert_eq!(refused, NcclError::Rank { rank: 2, ranks: 2 });
        }
        rank.barrier();
    });
}

pub(crate) fn killed_peer_is_aborted_and_its_memory_freed() {
    on_ranks("nccl::killed_peer_is_aborted_and_its_memory_freed", 2, |rank| {
        const BYTES: usize = 256 << 20;
        let nccl = nccl();
        let mut communicator = connected(&rank, &nccl);
        let stream: Stream<HostToDevice> = Stream::new(&rank.context).unwrap();
        let other: Stream<HostToDevice> = Stream::new(&rank.context).unwrap();
        let range = memory(&rank, BYTES);
        let deadline = Instant::now() + TIMEOUT;
        range.fill(1, &other).unwrap();
        other.synchronize().unwrap();
        rank.barrier();
        let of = |peer| [SendOrReceive { peer, piece: Piece::new(&range, 0, BYTES) }];
        if rank.rank == 1 {
            // Receives half of the operations that the peer would send.
            for _ in 0..20 {
                communicator.exchange(&[], &of(0), &stream, deadline).unwrap();
            }
            rank.kill_self();
        }
        for _ in 0..40 {
            communicator.exchange(&of(1), &[], &stream, deadline).unwrap();
        }
        // The event is not done until the peer is dead: the transfer waits for the peer.
        let event = kernels::cuda::Event::new(&rank.context).unwrap();
        event.record(&stream).unwrap();
        std::thread::sleep(Duration::from_secs(2));
        assert!(!event.is_done().unwrap(), "the transfer has finished without the peer");
        let took = communicator.abort(TIMEOUT).unwrap();
        println!("an abort took {took:?}");
        let begin = Instant::now();
        stream.synchronize().unwrap();
        range.fill(7, &other).unwrap();
        other.synchronize().unwrap();
        let mut found = vec![0u8; BYTES];
        range.read(0, &mut found).unwrap();
        assert!(found.iter().all(|byte| *byte == 7));
        drop(range);
        let more = memory(&rank, BYTES);
        more.fill(0, &stream).unwrap();
        stream.synchronize().unwrap();
        assert!(begin.elapsed() < TIMEOUT);
    });
}
