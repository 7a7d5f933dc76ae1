//! All-reduce and all-gather by Baton's kernels. Results are correct and equal on all ranks, and a
//! missing rank ends the collective.

use std::time::{Duration, Instant};

use half::bf16;
use kernels::{
    Backend, Dtype, RowSource, Shard, WeightFormat,
    cuda::{
        AllReduceAlgorithm, AllReduceNorm, AllReduceShape, Compute, CudaBackend, CudaError,
        CudaGroup, CudaOptions, DeviceMemory, Graph, GroupArena, GroupHandle, Range, Stream,
    },
};

use super::{
    bench::{Bench, DTYPES, Random, assert_near, cpu, numbers, short, tolerance},
    ranks::{Rank, on_ranks},
};

const MESSAGE_BYTES: usize = 1 << 20;
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) fn group(rank: &Rank, timeout: Duration) -> CudaGroup {
    group_for(rank, timeout, MESSAGE_BYTES)
}

fn group_for(rank: &Rank, timeout: Duration, bytes: usize) -> CudaGroup {
    let place = (rank.rank, rank.ranks);
    let arena = GroupArena::new(&rank.context, &rank.library, place, bytes).unwrap();
    let received = rank.exchange(&arena.handle().to_bytes());
    let handles: Vec<_> =
        received.iter().map(|received| GroupHandle::from_bytes(received).unwrap()).collect();
    let group = CudaGroup::new(arena, &handles, timeout).unwrap();
    rank.barrier();
    group
}

fn memory(rank: &Rank, bytes: usize) -> Range {
    DeviceMemory::new(&rank.context, "a test", bytes).unwrap().cut(bytes).unwrap()
}

fn put(range: &Range, dtype: Dtype, values: &[f32]) {
    match dtype {
        Dtype::F32 => range.write(0, values).unwrap(),
        Dtype::Bf16 => {
            let narrow: Vec<bf16> = values.iter().copied().map(bf16::from_f32).collect();
            range.write(0, &narrow).unwrap();
        }
    }
}

fn get(range: &Range, dtype: Dtype, count: usize) -> Vec<f32> {
    let mut wide = vec![0.0f32; count];
    match dtype {
        Dtype::F32 => range.read(0, &mut wide).unwrap(),
        Dtype::Bf16 => {
            let mut narrow = vec![bf16::ZERO; count];
            range.read(0, &mut narrow).unwrap();
            wide = narrow.iter().map(|value| value.to_f32()).collect();
        }
    }
    wide
}

/// Returns the expected f32 all-reduce, summed in rank order.
fn rank_sum(seed: u32, ranks: usize, count: usize) -> Vec<f32> {
    let mut sum = vec![0.0f32; count];
    for rank in 0..ranks {
        let sent = numbers(seed + rank as u32, count);
        sum.iter_mut().zip(sent).for_each(|(sum, value)| *sum += value);
    }
    sum
}

fn check_all_reduce(rank: Rank) {
    const EPS: f32 = 1e-5;
    let group = group(&rank, TIMEOUT);
    let stream: Stream<Compute> = Stream::new(&rank.context).unwrap();
    let [x, out, residual, weight] = [(); 4].map(|()| memory(&rank, MESSAGE_BYTES * 2));
    let shapes = [(1, 8), (1, 4096), (7, 576), (33, 1032), (2, 16_384), (64, 2048), (130, 1000)];
    let rounds = if short() { 1 } else { 5 };
    for (index, (dtype, (rows, width))) in (0..rounds)
        .flat_map(|_| DTYPES.into_iter().flat_map(|dtype| shapes.map(|shape| (dtype, shape))))
        .enumerate()
    {
        let count = rows * width;
        let seed = index as u32 * 16;
        let shape = AllReduceShape { dtype, rows, width };
        put(&x, dtype, &numbers(seed + rank.rank as u32, count));
        let sum = rank_sum(seed, rank.ranks, count);
        for (turn, way) in
            [AllReduceAlgorithm::Auto, AllReduceAlgorithm::OneShot, AllReduceAlgorithm::TwoShot]
                .into_iter()
                .enumerate()
        {
            out.fill(0xff, &stream).unwrap();
            // The CUDA graph is replayed twice; the second replay overwrites the output of the
            // first.
            if turn == 0 {
                let record = || group.all_reduce(shape, &x, &out, way, true, &stream);
                let mut graph = Graph::capture(&stream, record).unwrap();
                graph.launch(&stream).unwrap();
                graph.launch(&stream).unwrap();
                stream.synchronize().unwrap();
            } else {
                group.all_reduce(shape, &x, &out, way, false, &stream).unwrap();
                stream.synchronize().unwrap();
            }
            let wanted: Vec<f32> = match dtype {
                Dtype::F32 => sum.clone(),
                Dtype::Bf16 => sum.iter().map(|sum| bf16::from_f32(*sum).to_f32()).collect(),
            };
            let found = get(&out, dtype, count);
            assert!(found == wanted, "{dtype} {rows} x {width} {way:?}: not the sum in rank order");
        }
        let (before, weights) = (numbers(seed + 8, count), numbers(seed + 9, width));
        residual.write(0, &before).unwrap();
        weight.write(0, &weights).unwrap();
        out.fill(0xff, &stream).unwrap();
        let norm = AllReduceNorm { residual: &residual, weight: &weight, eps: EPS };
        group.all_reduce_norm(shape, &x, norm, &out, true, &stream).unwrap();
        stream.synchronize().unwrap();
        let after: Vec<f32> = before.iter().zip(&sum).map(|(before, sum)| before + sum).collect();
        assert!(get(&residual, Dtype::F32, count) == after, "{dtype} {rows} x {width}: residual");
        let mut wanted = Vec::new();
        for row in after.chunks(width) {
            let mean = row.iter().map(|value| value * value).sum::<f32>() / width as f32;
            let scale = (mean + EPS).sqrt().recip();
            wanted.extend(row.iter().zip(&weights).map(|(value, weight)| value * scale * weight));
        }
        let found = get(&out, dtype, count);
        assert_near(&found, &wanted, tolerance(dtype), &format!("{dtype} {rows} x {width} norm"));
        let bits: Vec<u8> = found.iter().flat_map(|value| value.to_le_bytes()).collect();
        let received = rank.exchange(&bits[..bits.len().min(4096)]);
        assert!(received.iter().all(|other| *other == received[0]), "ranks differ");
    }
    group.check().unwrap();
    let too_long = AllReduceShape { dtype: Dtype::F32, rows: 1024, width: 512 };
    let error = group
        .all_reduce(too_long, &x, &out, AllReduceAlgorithm::OneShot, false, &stream)
        .unwrap_err();
    assert!(error.to_string().contains("the arenas of"), "{error}");
}

pub(crate) fn all_reduce_of_two_ranks_is_identical_on_both() {
    on_ranks("collective::all_reduce_of_two_ranks_is_identical_on_both", 2, check_all_reduce);
}

pub(crate) fn all_reduce_of_four_ranks_is_identical_on_all() {
    on_ranks("collective::all_reduce_of_four_ranks_is_identical_on_all", 4, check_all_reduce);
}

/// Returns random words. One in a hundred equals the arena's marker of missing data.
fn words(seed: u32, count: usize) -> Vec<u32> {
    let hash = |i: u32| (i ^ seed.wrapping_mul(0x85eb_ca6b)).wrapping_mul(0x9e37_79b9);
    (0..count as u32).map(|i| if hash(i) >> 16 < 655 { u32::MAX } else { hash(i) }).collect()
}

fn check_all_gather(rank: Rank) {
    let stream: Stream<Compute> = Stream::new(&rank.context).unwrap();
    let shard = Shard::new(rank.rank, rank.ranks).unwrap();
    let bytes = 40 << 20;
    let [x, out] = [(); 2].map(|()| memory(&rank, bytes));
    let even = |columns: usize| -> Vec<_> { shard.all().map(|s| s.tokens(columns)).collect() };
    // The last rank has no columns.
    let uneven = |columns: usize| -> Vec<_> {
        let border = |rank| match rank {
            0 => 0,
            _ if rank + 1 >= shard.rank_count() => columns,
            _ => rank * 5,
        };
        (0..shard.rank_count()).map(|rank| border(rank)..border(rank + 1)).collect()
    };
    // A small arena takes many rounds.
    for message_bytes in [32 << 10, MESSAGE_BYTES] {
        let group = group_for(&rank, TIMEOUT, message_bytes);
        let shapes = [
            (1, even(7)),
            (1, even(128_256)),
            (3, even(50_257)),
            (33, even(1003)),
            (40, even(128_256)),
            (130, even(49_152)),
            (65, uneven(1001)),
            (2, uneven(70_000)),
        ];
        for (index, (rows, columns)) in shapes.into_iter().enumerate() {
            let all = columns.last().unwrap().end;
            let (own, stride) = (columns[rank.rank].clone(), columns[rank.rank].len() + 3);
            let whole = words(index as u32, rows * all);
            let mut mine = vec![7; rows * stride];
            for (mine, whole) in mine.chunks_mut(stride).zip(whole.chunks(all)) {
                mine[..own.len()].copy_from_slice(&whole[own.clone()]);
            }
            x.write(0, &mine).unwrap();
            let gather = || group.gather(&columns, (&x, stride), (&out, all + 5), rows, &stream);
            let mut graph = Graph::capture(&stream, || gather().and_then(|()| gather())).unwrap();
            for turn in 0..3 {
                out.fill(0x55, &stream).unwrap();
                match turn {
                    0 => gather().unwrap(),
                    _ => graph.launch(&stream).unwrap(),
                }
                stream.synchronize().unwrap();
                group.check().unwrap();
                let mut found = vec![0_u32; rows * (all + 5)];
                out.read(0, &mut found).unwrap();
                for (row, (found, whole)) in
                    found.chunks(all + 5).zip(whole.chunks(all)).enumerate()
                {
                    assert!(
                        found[..all] == *whole,
                        "row {row} of {rows}, {columns:?}, turn {turn}"
                    );
                    assert!(found[all..] == [0x5555_5555; 5], "row {row}: written beyond its end");
                }
            }
        }
        rank.barrier();
    }
    // A rank that skips the collective causes a time-out.
    let timeout = Duration::from_millis(200);
    let group = group_for(&rank, timeout, MESSAGE_BYTES);
    let columns = even(128_256);
    let stride = columns[rank.rank].len();
    let gather = || group.gather(&columns, (&x, stride), (&out, 128_256), 40, &stream).unwrap();
    if rank.rank == 0 {
        let begin = Instant::now();
        gather();
        gather();
        stream.synchronize().unwrap();
        assert!(begin.elapsed() >= timeout && begin.elapsed() < TIMEOUT, "{:?}", begin.elapsed());
        assert_eq!(group.check(), Err(CudaError::GroupStopped { rank: 0, timeout }));
    }
    rank.barrier();
    group.reset().unwrap();
    rank.barrier();
    gather();
    stream.synchronize().unwrap();
    group.check().unwrap();
    rank.barrier();
}

pub(crate) fn two_ranks_all_gather_rows() {
    on_ranks("collective::two_ranks_all_gather_rows", 2, check_all_gather);
}

pub(crate) fn four_ranks_all_gather_rows() {
    on_ranks("collective::four_ranks_all_gather_rows", 4, check_all_gather);
}

/// Some columns of a matrix of reproducible random values.
struct Columns {
    whole: Random,
    columns: std::ops::Range<usize>,
}

impl RowSource for Columns {
    fn rows(&self) -> usize {
        self.whole.rows
    }

    fn cols(&self) -> usize {
        self.columns.len()
    }

    fn read_row(&self, row: usize, out: &mut [f32]) {
        let mut whole = vec![0.0; self.whole.cols];
        self.whole.read_row(row, &mut whole);
        out.copy_from_slice(&whole[self.columns.clone()]);
    }
}

/// Checks a row-parallel GEMM with all-reduce into the residual stream and the norm after it. The
/// CPU backend computes the expected values with all columns.
fn check_all_reduce_to_residual(rank: Rank) {
    const EPS: f32 = 1e-5;
    // The last case has more rows than the arenas hold at once.
    for (dtype, rows, inputs, width) in [
        (Dtype::F32, 1, 64, 128),
        (Dtype::Bf16, 1, 1024, 1024),
        (Dtype::Bf16, 33, 512, 2048),
        (Dtype::Bf16, 700, 64, 1024),
        (Dtype::F32, 600, 64, 1024),
        (Dtype::F32, 1501, 64, 1024),
    ] {
        let source = || Random { rows: width, cols: inputs, seed: 21 };
        // Values are small: each rank's partial sum is rounded to bf16, and partial sums may cancel
        // out.
        let input: Vec<f32> = numbers(22, rows * inputs).iter().map(|x| x / 16.0).collect();
        let (before, weights) = (numbers(23, rows * width), numbers(24, width));
        let mut cpu = cpu(dtype);
        let w = cpu.matrix(&source());
        let (mut x, mut delta, mut residual, mut out) = (
            cpu.buffer(rows, inputs),
            cpu.buffer(rows, width),
            cpu.wide_buffer(rows, width),
            cpu.buffer(rows, width),
        );
        cpu.put(&mut x, &input);
        cpu.put(&mut residual, &before);
        let norm = cpu.vector(&weights);
        let norm = (&norm, EPS);
        let stream = (&mut delta, &mut residual);
        cpu.project_onto_residual(rows, (&x, &w, None), None, stream, norm, &mut out);
        // Every rank has all rows of the norm and multiplies them by another matrix.
        let reader = || Random { rows: 48, cols: width, seed: 25 };
        let (next, mut read) = (cpu.matrix(&reader()), cpu.buffer(rows, 48));
        cpu.matmul(rows, &out, &next, &mut read);
        let wanted = [&residual, &out, &read].map(|buffer| cpu.get(buffer, rows));

        let format = match dtype {
            Dtype::F32 => WeightFormat::F32,
            Dtype::Bf16 => WeightFormat::Bf16,
        };
        let group = group(&rank, TIMEOUT);
        let options = CudaOptions::new(format);
        let mut cuda =
            CudaBackend::new(&rank.context, rank.library.clone(), options).unwrap().in_group(group);
        let columns = cuda.shard().part(inputs);
        assert_eq!((cuda.shard().rank(), cuda.shard().rank_count()), (rank.rank, rank.ranks));
        let part = Columns { whole: source(), columns: columns.clone() };
        let make = |backend: &CudaBackend| {
            (
                backend.matrix(&part),
                backend.vector(&weights),
                backend.buffer(rows, columns.len()),
                backend.buffer(rows, width),
                backend.wide_buffer(rows, width),
                backend.buffer(rows, width),
                (backend.matrix(&reader()), backend.buffer(rows, 48)),
            )
        };
        drop(make(&cuda));
        cuda.place().unwrap();
        let (w, norm, mut x, mut delta, mut residual, mut out, (next, mut read)) = make(&cuda);
        cuda.finish_loading().unwrap();
        let mine: Vec<f32> =
            input.chunks(inputs).flat_map(|row| row[columns.clone()].to_vec()).collect();
        cuda.put(&mut x, &mine);
        cuda.put(&mut residual, &before);
        Bench::poison(&cuda, &mut out);
        let norm = (&norm, EPS);
        let stream = (&mut delta, &mut residual);
        cuda.project_onto_residual(rows, (&x, &w, None), None, stream, norm, &mut out);
        cuda.matmul(rows, &out, &next, &mut read);
        let found = [&residual, &out, &read].map(|buffer| cuda.get(buffer, rows));
        for (index, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
            let what = format!("{dtype} {rows} x {inputs} x {width}, result {index}");
            // The rounding error grows with the number of rounded values in a sum.
            let factor = if index == 2 { (width as f32).sqrt() } else { 2.0 };
            assert_near(found, wanted, factor * tolerance(dtype), &what);
        }
        let bits: Vec<u8> = found.concat().iter().flat_map(|value| value.to_le_bytes()).collect();
        let hash = xxhash_rust::xxh3::xxh3_128(&bits).to_le_bytes();
        let received = rank.exchange(&hash);
        assert!(received.iter().all(|other| *other == hash), "ranks differ: {dtype} {rows} rows");
        cuda.check().unwrap();
        // A rank must not free its arena while another rank may write to it.
        rank.barrier();
    }
}

pub(crate) fn backend_of_two_ranks_adds_all_reduce_to_residual() {
    on_ranks(
        "collective::backend_of_two_ranks_adds_all_reduce_to_residual",
        2,
        check_all_reduce_to_residual,
    );
}

pub(crate) fn backend_of_four_ranks_adds_all_reduce_to_residual() {
    on_ranks(
        "collective::backend_of_four_ranks_adds_all_reduce_to_residual",
        4,
        check_all_reduce_to_residual,
    );
}

pub(crate) fn missing_rank_times_out_and_the_group_restarts() {
    let name = "collective::missing_rank_times_out_and_the_group_restarts";
    on_ranks(name, 2, |rank| {
        let timeout = Duration::from_millis(200);
        let group = group(&rank, timeout);
        let stream: Stream<Compute> = Stream::new(&rank.context).unwrap();
        let shape = AllReduceShape { dtype: Dtype::F32, rows: 3, width: 1024 };
        let x = memory(&rank, shape.bytes());
        put(&x, Dtype::F32, &numbers(rank.rank as u32, 3 * 1024));
        let sum = |way| group.all_reduce(shape, &x, &x, way, false, &stream).unwrap();
        if rank.rank == 0 {
            let begin = Instant::now();
            // The second collective does not wait for the time-out again.
            sum(AllReduceAlgorithm::OneShot);
            sum(AllReduceAlgorithm::TwoShot);
            stream.synchronize().unwrap();
            assert!(
                begin.elapsed() >= timeout && begin.elapsed() < TIMEOUT,
                "{:?}",
                begin.elapsed()
            );
            assert_eq!(group.check(), Err(CudaError::GroupStopped { rank: 0, timeout }));
        }
        rank.barrier();
        group.reset().unwrap();
        group.check().unwrap();
        rank.barrier();
        put(&x, Dtype::F32, &numbers(rank.rank as u32, 3 * 1024));
        sum(AllReduceAlgorithm::OneShot);
        stream.synchronize().unwrap();
        group.check().unwrap();
        assert!(get(&x, Dtype::F32, 3 * 1024) == rank_sum(0, 2, 3 * 1024));
    });
}

pub(crate) fn abort_and_group_shutdown_end_an_all_reduce_at_once() {
    on_ranks("collective::abort_and_group_shutdown_end_an_all_reduce_at_once", 2, |rank| {
        let group = group(&rank, Duration::from_secs(600));
        let stream: Stream<Compute> = Stream::new(&rank.context).unwrap();
        let shape = AllReduceShape { dtype: Dtype::Bf16, rows: 1, width: 4096 };
        let x = memory(&rank, shape.bytes());
        if rank.rank == 0 {
            group.all_reduce(shape, &x, &x, AllReduceAlgorithm::Auto, false, &stream).unwrap();
            let begin = Instant::now();
            group.stop().unwrap();
            stream.synchronize().unwrap();
            assert!(begin.elapsed() < TIMEOUT, "{:?}", begin.elapsed());
            assert!(group.check().is_err());
        }
        rank.barrier();
        group.reset().unwrap();
        rank.barrier();
        if rank.rank == 0 {
            let begin = Instant::now();
            group.all_reduce(shape, &x, &x, AllReduceAlgorithm::Auto, false, &stream).unwrap();
            drop(group);
            assert!(begin.elapsed() < TIMEOUT, "{:?}", begin.elapsed());
        }
        rank.barrier();
    });
}

pub(crate) fn killed_rank_is_detected_and_the_gpu_stays_usable() {
    on_ranks("collective::killed_rank_is_detected_and_the_gpu_stays_usable", 2, |rank| {
        let group = group(&rank, Duration::from_millis(300));
        let stream: Stream<Compute> = Stream::new(&rank.context).unwrap();
        let shape = AllReduceShape { dtype: Dtype::Bf16, rows: 8, width: 4096 };
        let x = memory(&rank, shape.bytes());
        x.fill(0, &stream).unwrap();
        rank.barrier();
        let begin = Instant::now();
        for count in 0.. {
            group.all_reduce(shape, &x, &x, AllReduceAlgorithm::Auto, false, &stream).unwrap();
            if rank.rank == 1 && count == 500 {
                rank.kill_self();
            }
            stream.synchronize().unwrap();
            if group.check().is_err() {
                break;
            }
            assert!(begin.elapsed() < TIMEOUT, "the missing rank is not detected");
        }
        println!("missing rank detected after {:?}", begin.elapsed());
        drop(group);
        let more = memory(&rank, 64 << 20);
        more.fill(3, &stream).unwrap();
        stream.synchronize().unwrap();
        let mut found = vec![0u8; 64 << 20];
        more.read(0, &mut found).unwrap();
        assert!(found.iter().all(|byte| *byte == 3));
    });
}

pub(crate) fn mismatched_ipc_handles_are_rejected_by_rank() {
    on_ranks("collective::mismatched_ipc_handles_are_rejected_by_rank", 2, |rank| {
        let arena = |bytes| {
            let place = (rank.rank, rank.ranks);
            GroupArena::new(&rank.context, &rank.library, place, bytes).unwrap()
        };
        let (own, other) = (arena(1 << 20), arena(2 << 20));
        let mut received: Vec<GroupHandle> = rank
            .exchange(&own.handle().to_bytes())
            .iter()
            .map(|received| GroupHandle::from_bytes(received).unwrap())
            .collect();
        let refused = |arena, handles: &[GroupHandle], words: &str| {
            let error = CudaGroup::new(arena, handles, TIMEOUT).unwrap_err().to_string();
            assert!(error.contains("the arena of rank") && error.contains(words), "{error}");
        };
        // The error names the first mismatched rank.
        let words =
            ["differs from the arena that this rank has allocated", "bytes and 2 ranks; expected"];
        refused(other, &received, words[rank.rank]);
        received.swap(0, 1);
        refused(own, &received, "has the handle of another rank");
        refused(arena(1 << 20), &[], "has no handle");
        let alone = GroupArena::new(&rank.context, &rank.library, (0, 3), 1 << 20).unwrap_err();
        assert!(alone.to_string().contains("2, 4 or 8"), "{alone}");
        rank.barrier();
    });
}
