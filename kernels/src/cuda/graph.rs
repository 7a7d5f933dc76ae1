//! Recorded work: a forward's kernels, put into the stream by one call.

use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::{
    captured::Captured,
    context::{Compute, Context, Stream},
    error::{CudaError, Named},
};

/// What was put into a stream while it was recorded, with the addresses and sizes of then. Whoever
/// replays it keeps that memory.
#[derive(Debug)]
pub struct Graph {
    raw: sys::CUgraphExec,
    context: Arc<Context>,
    captured: Captured,
}

// SAFETY: the driver lets every thread use a graph, one at a time, which `&mut self` sees to.
unsafe impl Send for Graph {}

impl Graph {
    /// Records what `work` puts into `stream`: nothing of it runs. It may wait for no event of another
    /// stream, copy nothing of the host's, and load no kernel: run it once before.
    pub fn record(
        stream: &Stream<Compute>,
        work: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<Self, CudaError> {
        stream.context().bind()?;
        // DriverCalls of other threads, such as copies of the transfers, go on meanwhile.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive, and not the default one.
        unsafe { result::stream::begin_capture(stream.raw(), mode) }
            .named("cuStreamBeginCapture")?;
        let outcome = work();
        // SAFETY: the capture was begun above. It is ended whatever happened in it.
        let recorded = unsafe { result::stream::end_capture(stream.raw()) };
        let graph = recorded.named("cuStreamEndCapture");
        if let (Err(error), Ok(graph)) = (&outcome, &graph) {
            // SAFETY: as below.
            let _ = unsafe { result::graph::destroy(*graph) };
            return Err(error.clone());
        }
        // What ended the recording, where the work itself had no fault.
        outcome?;
        let graph = graph?;
        let captured = Captured::of(graph);
        // SAFETY: the graph was made just now. The flags are none.
        let raw = unsafe { result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)) };
        // SAFETY: it is destroyed once; what was made of it does not need it.
        let _ = unsafe { result::graph::destroy(graph) };
        let raw = raw.named("cuGraphInstantiateWithFlags")?;
        let context = Arc::clone(stream.context());
        let mut graph = Self { raw, context, captured: Captured::default() };
        graph.captured = captured?;
        // SAFETY: both are alive. The first launch need not do it.
        unsafe { result::graph::upload(raw, stream.raw()) }.named("cuGraphUpload")?;
        Ok(graph)
    }

    /// Puts all of it into the stream. Debug builds look first whether all memory that it touches is
    /// what it was when it was recorded.
    pub fn launch(&mut self, stream: &Stream<Compute>) -> Result<(), CudaError> {
        self.captured.verify();
        // SAFETY: both are alive; its memory is kept, as `record` asks.
        unsafe { result::graph::launch(self.raw, stream.raw()) }.named("cuGraphLaunch")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: destroyed once; the driver waits with that until it has run.
        let _ = unsafe { result::graph::exec_destroy(self.raw) };
    }
}
