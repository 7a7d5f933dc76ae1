//! A CUDA graph detects that memory it was captured with was freed or reused.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread,
};

use kernels::{
    Backend, WeightFormat,
    backend::GatedActivation,
    cuda::{AttentionKind, Compute, DeviceMemory, Graph, Stream},
};

use test_harness::skip;

use super::bench::{Bench, gpu, numbers};

/// Asserts that a replay panicked because a captured address is stale.
fn assert_stale<T>(launched: thread::Result<T>, what: &str) {
    let Err(panic) = launched else { panic!("not detected: {what}") };
    let words = panic.downcast_ref::<String>().map_or("a panic without a message", String::as_str);
    assert!(words.contains("was freed or reused after capture"), "{what}: {words}");
}

pub(crate) fn graph_replay_without_its_memory_is_detected() {
    let gpu = gpu();
    if !cfg!(debug_assertions) {
        skip("only debug builds check the addresses in a graph");
    }
    let (rows, width) = (3, 64);
    let buffers = |backend: &kernels::cuda::CudaBackend| {
        (backend.buffer(rows, 2 * width), backend.buffer(rows, width))
    };
    let (mut backend, (mut gate_up, mut out)) =
        gpu.backend(WeightFormat::F32, AttentionKind::Auto, buffers);
    backend.put(&mut gate_up, &numbers(1, rows * 2 * width));
    let mut run = |backend: &mut kernels::cuda::CudaBackend| {
        backend.activate(GatedActivation::Silu, rows, &gate_up, &mut out);
    };
    run(&mut backend);
    let mut graph = backend.capture(run).unwrap();
    let compute = Arc::clone(backend.compute());
    graph.launch(&compute).unwrap();
    compute.synchronize().unwrap();
    drop((backend, gate_up, out));
    let stale = catch_unwind(AssertUnwindSafe(|| graph.launch(&compute)));
    assert_stale(stale, "the memory was freed");
}

pub(crate) fn graph_replay_on_reused_memory_is_detected() {
    let gpu = gpu();
    if !cfg!(debug_assertions) {
        skip("only debug builds check the addresses in a graph");
    }
    let stream = Stream::<Compute>::new(&gpu.context).unwrap();
    let memory = || DeviceMemory::new(&gpu.context, "a test", 64 << 20).unwrap();
    let range = memory().cut(64 << 20).unwrap();
    let mut graph = Graph::capture(&stream, || range.fill(1, &stream)).unwrap();
    graph.launch(&stream).unwrap();
    stream.synchronize().unwrap();
    drop(range);
    // The allocator usually returns the same address.
    let _other = memory();
    let stale = catch_unwind(AssertUnwindSafe(|| graph.launch(&stream)));
    assert_stale(stale, "the memory was reused");
}
