//! CUDA graphs: a captured forward pass, launched by one call.

use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::{
    captured::Captured,
    context::{Compute, Context, Stream},
    error::{CudaError, Named},
};

/// A captured CUDA graph. Addresses and sizes are those at capture; the caller keeps that memory
/// allocated.
#[derive(Debug)]
pub struct Graph {
    raw: sys::CUgraphExec,
    context: Arc<Context>,
    captured: Captured,
}

// SAFETY: the driver allows a graph on every thread, one thread at a time, as `&mut self` ensures.
unsafe impl Send for Graph {}

impl Graph {
    /// Captures the operations that `work` enqueues on `stream`, without running them. `work` must
    /// not wait for an event of another stream, copy host memory, or load a kernel: run `work` once
    /// before the capture.
    pub fn capture(
        stream: &Stream<Compute>,
        work: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<Self, CudaError> {
        stream.context().bind()?;
        // Other threads, such as KV transfers, may call the driver during the capture.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive and is not the default stream.
        unsafe { result::stream::begin_capture(stream.raw(), mode) }
            .named("cuStreamBeginCapture")?;
        let outcome = work();
        // SAFETY: the capture was begun above, and is ended even if `work` failed.
        let ended = unsafe { result::stream::end_capture(stream.raw()) };
        let graph = ended.named("cuStreamEndCapture");
        if let (Err(error), Ok(graph)) = (&outcome, &graph) {
            // SAFETY: the capture created the graph, and nothing else destroys it on this path.
            let _ = unsafe { result::graph::destroy(*graph) };
            return Err(error.clone());
        }
        outcome?;
        let graph = graph?;
        let captured = Captured::of(graph);
        // SAFETY: the graph is alive; no flags are set.
        let raw = unsafe { result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)) };
        // SAFETY: the graph is destroyed once, and the executable graph does not need it.
        let _ = unsafe { result::graph::destroy(graph) };
        let raw = raw.named("cuGraphInstantiateWithFlags")?;
        let context = Arc::clone(stream.context());
        let mut graph = Self { raw, context, captured: Captured::default() };
        graph.captured = captured?;
        // SAFETY: both are alive. Uploading now keeps the upload out of the first launch.
        unsafe { result::graph::upload(raw, stream.raw()) }.named("cuGraphUpload")?;
        Ok(graph)
    }

    /// Launches the graph on `stream`. Debug builds first check that all memory the graph uses is
    /// still allocated.
    pub fn launch(&mut self, stream: &Stream<Compute>) -> Result<(), CudaError> {
        self.captured.verify();
        // SAFETY: both are alive; the caller keeps the memory, as `capture` requires.
        unsafe { result::graph::launch(self.raw, stream.raw()) }.named("cuGraphLaunch")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: the graph is destroyed once; the driver defers this until the graph has run.
        let _ = unsafe { result::graph::exec_destroy(self.raw) };
    }
}
