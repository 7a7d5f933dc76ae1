//! A GPU's context, its streams and events.
//!
//! A stream's type has a role, so that work of one role cannot be enqueued on a stream of another
//! role.
//!
//! A device buffer that one stream writes and another reads has one owner, together with its
//! events: a step's plan and results in `DeviceBatch`, a staging slot in `Staging`. The owner
//! records the event after the last use and makes the next stream wait for the event; the buffer
//! never leaves the owner. Host memory of a copy is an `InFlight`, which holds memory and event.
//! Another stream accesses KV blocks only after the host has seen the event of the step that wrote
//! them.

use std::{
    marker::PhantomData,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use cudarc::driver::{result, sys};

use super::{
    driver::{Device, Driver},
    driver_calls::DriverCalls,
    error::{CudaError, Named, reason},
};

/// The primary context of one GPU. Every thread that calls the driver first calls
/// [`Context::bind`].
#[derive(Debug)]
pub struct Context {
    raw: sys::CUcontext,
    device: Device,
    driver: Driver,
    /// GPU memory in bytes that this process has allocated.
    taken: AtomicU64,
    /// Calls that blocked the host until the device was done.
    waits: AtomicU64,
    calls: DriverCalls,
}

// SAFETY: the driver allows a context on every thread; the handle is never dereferenced.
unsafe impl Send for Context {}
// SAFETY: `&Context` passes the handle to the driver, whose calls are thread-safe; the other fields
// are Sync.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the GPU's primary context and makes it current on this thread.
    pub fn new(driver: Driver, device: Device) -> Result<Arc<Self>, CudaError> {
        // SAFETY: the started driver has enumerated the device.
        let raw = unsafe { result::primary_ctx::retain(device.raw) }.map_err(|error| {
            let (uuid, code) = (device.uuid.clone(), error.0 as i32);
            CudaError::DeviceBusy { uuid, code, reason: reason(error) }
        })?;
        let (taken, waits) = (AtomicU64::new(0), AtomicU64::new(0));
        let context = Self { raw, device, driver, taken, waits, calls: DriverCalls::default() };
        context.bind()?;
        Ok(Arc::new(context))
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    pub fn driver(&self) -> Driver {
        self.driver
    }

    /// Returns the tracked driver calls of this context that may take long.
    pub(super) fn calls(&self) -> &DriverCalls {
        &self.calls
    }

    /// Makes the context current on the calling thread.
    pub fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context lives as long as this value.
        unsafe { result::ctx::set_current(self.raw) }.named("cuCtxSetCurrent")
    }

    /// Enables access to the memory of another GPU, where the two GPUs support peer access.
    pub(super) fn reach(&self, other: &Context) -> Result<(), CudaError> {
        if self.device == other.device {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: both contexts are alive.
        let code = unsafe { sys::cuCtxEnablePeerAccess(other.raw, 0) };
        match code {
            sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            _ => code.named("cuCtxEnablePeerAccess"),
        }
    }

    /// Returns the free GPU memory in bytes.
    pub fn free_bytes(&self) -> Result<u64, CudaError> {
        self.bind()?;
        let (free, _) = result::mem_get_info().named("cuMemGetInfo")?;
        Ok(free as u64)
    }

    /// Returns the bytes that this process has allocated. Unlike a difference of free bytes, the
    /// number excludes other processes.
    pub fn taken_bytes(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    pub(super) fn count_allocated(&self, bytes: u64) {
        self.taken.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn count_freed(&self, bytes: u64) {
        self.taken.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Waits for all work of the context. For start and shutdown only.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.bind()?;
        self.count_wait();
        result::ctx::synchronize().named("cuCtxSynchronize")
    }

    /// Returns how often the host has blocked on the device; the target is once per step.
    pub fn waits(&self) -> u64 {
        self.waits.load(Ordering::Relaxed)
    }

    pub(super) fn count_wait(&self) {
        self.waits.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // A failure means that an error has ended the context, and nothing can be released.
        // SAFETY: the context was retained once in `new`; everything created in it holds it and was
        // dropped.
        let _ = unsafe { result::primary_ctx::release(self.device.raw) };
    }
}

/// The use of a stream.
pub trait StreamRole: 'static {}

/// Copies from host to device.
#[derive(Debug)]
pub enum HostToDevice {}
/// Kernels.
#[derive(Debug)]
pub enum Compute {}
/// Copies from device to host.
#[derive(Debug)]
pub enum DeviceToHost {}

impl StreamRole for HostToDevice {}
impl StreamRole for Compute {}
impl StreamRole for DeviceToHost {}

/// A CUDA stream, never the default stream, which synchronizes with all others.
#[derive(Debug)]
pub struct Stream<R: StreamRole> {
    raw: sys::CUstream,
    context: Arc<Context>,
    role: PhantomData<fn() -> R>,
}

// SAFETY: the driver allows a stream on every thread.
unsafe impl<R: StreamRole> Send for Stream<R> {}
// SAFETY: `&Stream` passes the handle to the driver, whose calls are thread-safe.
unsafe impl<R: StreamRole> Sync for Stream<R> {}

impl<R: StreamRole> Stream<R> {
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        context.bind()?;
        let kind = result::stream::StreamKind::NonBlocking;
        let raw = result::stream::create(kind).named("cuStreamCreate")?;
        Ok(Self { raw, context: Arc::clone(context), role: PhantomData })
    }

    /// Creates a stream of the highest priority: its kernels are scheduled before waiting kernels
    /// of others.
    pub fn urgent(context: &Arc<Context>) -> Result<Self, CudaError> {
        Self::with_priority(context, |_, greatest| greatest)
    }

    /// Creates a stream of the lowest priority: its work is scheduled after waiting work of others.
    pub fn relaxed(context: &Arc<Context>) -> Result<Self, CudaError> {
        Self::with_priority(context, |least, _| least)
    }

    fn with_priority(
        context: &Arc<Context>,
        choose: impl FnOnce(i32, i32) -> i32,
    ) -> Result<Self, CudaError> {
        context.bind()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: two numbers are written; a context is current.
        unsafe { sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest) }
            .named("cuCtxGetStreamPriorityRange")?;
        let kind = result::stream::StreamKind::NonBlocking;
        let raw = result::stream::create_with_priority(kind, choose(least, greatest))
            .named("cuStreamCreateWithPriority")?;
        Ok(Self { raw, context: Arc::clone(context), role: PhantomData })
    }

    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Waits for all work of the stream. For start and shutdown only.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.context.bind()?;
        self.context.count_wait();
        // SAFETY: the stream is alive.
        unsafe { result::stream::synchronize(self.raw) }.named("cuStreamSynchronize")
    }

    /// Makes all later work of this stream wait for the event.
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both are alive; the driver keeps its own copy of the event's state.
        unsafe { result::stream::wait_event(self.raw, event.raw, flags) }.named("cuStreamWaitEvent")
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }
}

impl<R: StreamRole> Drop for Stream<R> {
    fn drop(&mut self) {
        // SAFETY: the stream is destroyed once; the driver completes its work first. A failure
        // means that an error has ended the context, and nothing can be released.
        let _ = unsafe { result::stream::destroy(self.raw) };
    }
}

/// A CUDA event.
#[derive(Debug)]
pub struct Event {
    raw: sys::CUevent,
    context: Arc<Context>,
}

// SAFETY: the driver allows an event on every thread.
unsafe impl Send for Event {}
// SAFETY: `&Event` passes the handle to the driver, whose calls are thread-safe.
unsafe impl Sync for Event {}

impl Event {
    /// Creates an event without timing.
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        Self::with(context, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// Creates an event with timing, which has some overhead.
    pub fn timed(context: &Arc<Context>) -> Result<Self, CudaError> {
        Self::with(context, sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn with(context: &Arc<Context>, flags: sys::CUevent_flags) -> Result<Self, CudaError> {
        context.bind()?;
        let raw = result::event::create(flags).named("cuEventCreate")?;
        Ok(Self { raw, context: Arc::clone(context) })
    }

    /// Records the event after all work enqueued on the stream so far.
    pub fn record<R: StreamRole>(&self, stream: &Stream<R>) -> Result<(), CudaError> {
        // SAFETY: both are alive.
        unsafe { result::event::record(self.raw, stream.raw) }.named("cuEventRecord")
    }

    /// Returns whether the recorded work has completed; true when nothing was recorded.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: the event is alive.
        match unsafe { result::event::query(self.raw) } {
            Ok(()) => Ok(true),
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            Err(error) => Err(CudaError::driver("cuEventQuery", error)),
        }
    }

    /// Blocks the host until the recorded work has completed.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.context.count_wait();
        // SAFETY: the event is alive.
        unsafe { result::event::synchronize(self.raw) }.named("cuEventSynchronize")
    }

    /// Returns the milliseconds between two completed [`timed`](Self::timed) events.
    pub fn milliseconds_since(&self, begin: &Event) -> Result<f32, CudaError> {
        // SAFETY: both are alive; the driver returns an error for events without timing or not
        // completed.
        unsafe { result::event::elapsed(begin.raw, self.raw) }.named("cuEventElapsedTime")
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event is destroyed once. As with streams, nothing can be done about a
        // failure.
        let _ = unsafe { result::event::destroy(self.raw) };
    }
}
