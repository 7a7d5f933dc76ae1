//! Errors at start, and the guarantees of device memory and streams.

use kernels::WeightFormat;
use kernels::cuda::{
    Compute, CudaBackend, CudaError, CudaOptions, DeviceMemory, DeviceToHost, Event, HostToDevice,
    PinnedMemory, Stream,
};

use super::bench::gpu;

pub(crate) fn out_of_memory_names_requested_and_free_bytes() {
    let gpu = gpu();
    let before = gpu.context.free_bytes().unwrap();
    let error = DeviceMemory::new(&gpu.context, "the weights", 1 << 50).unwrap_err();
    let CudaError::OutOfMemory { what, wanted, free } = error else { panic!("{error}") };
    assert_eq!((what, wanted), ("the weights", 1 << 50));
    assert!(free > 0 && free <= gpu.context.device().memory_bytes, "{free} of {before}");
}

pub(crate) fn dropped_memory_is_freed() {
    let gpu = gpu();
    let before = gpu.context.free_bytes().unwrap();
    let memory = DeviceMemory::new(&gpu.context, "a test", 1 << 30).unwrap();
    let range = memory.cut(1 << 20).unwrap();
    drop(memory);
    assert!(
        gpu.context.free_bytes().unwrap() + (1 << 30) <= before + (1 << 21),
        "a range keeps the memory allocated"
    );
    drop(range);
    assert!(gpu.context.free_bytes().unwrap() + (1 << 21) >= before);
}

pub(crate) fn weight_format_without_kernels_is_rejected() {
    let gpu = gpu();
    let options = CudaOptions::new(WeightFormat::Q8);
    let error = CudaBackend::new(&gpu.context, gpu.library.clone(), options).err().unwrap();
    assert!(error.to_string().contains("q8") && error.to_string().contains("bf16"), "{error}");
}

pub(crate) fn event_orders_a_write_before_a_read_on_another_stream() {
    let gpu = gpu();
    let context = &gpu.context;
    let up = Stream::<HostToDevice>::new(context).unwrap();
    let down = Stream::<DeviceToHost>::new(context).unwrap();
    let _compute = Stream::<Compute>::new(context).unwrap();
    let words = 8 << 20;
    let memory = DeviceMemory::new(context, "a test", 4 * words).unwrap();
    let range = memory.cut(4 * words).unwrap();
    let mut from = PinnedMemory::<u32>::zeroed(context, "a test", words).unwrap();
    let mut to = PinnedMemory::<u32>::zeroed(context, "a test", words).unwrap();
    for round in 1..20u32 {
        from.iter_mut().enumerate().for_each(|(i, word)| *word = i as u32 ^ (round << 20));
        let event = || Event::new(context).unwrap();
        let sent = from.upload(words, &range, 0, &up, event()).unwrap();
        down.wait(sent.event()).unwrap();
        let received = to.download(words, &range, 0, &down, event()).unwrap();
        to = received.finish().unwrap().0;
        assert!(sent.is_done().unwrap());
        from = sent.finish().unwrap().0;
        assert!(from[..] == to[..], "round {round}");
    }
    assert!(context.waits() < 25, "too many synchronisations: {}", context.waits());
}
