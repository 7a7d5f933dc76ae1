//! A GPU's context, its streams, and the events between them.
//!
//! Each stream has a role in its type, so that work of one role cannot be put on the stream of another.
//!
//! A device buffer that one stream writes and another reads lies in one owner together with its events: a
//! step's plan and results in `DeviceBatch`, a staging slot in `Staging`. The owner records the event
//! behind the last use and makes the next stream wait for it; the buffer never leaves the owner. Host
//! memory of a copy travels in `InFlight`, which holds memory and event. KV blocks reach another stream
//! only after the host has seen the event of the step that wrote them.

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

/// The primary context of one GPU. Whoever calls the driver from a thread of its own makes it
/// current there first, by [`Context::bind`].
#[derive(Debug)]
pub struct Context {
    raw: sys::CUcontext,
    device: Device,
    driver: Driver,
    /// Bytes of its memory that this process has allocated.
    taken: AtomicU64,
    /// DriverCalls that made the host wait for the device.
    waits: AtomicU64,
    calls: DriverCalls,
}

// SAFETY: the driver lets every thread use a context; the handle is a number to us.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Makes the GPU ready for this process, and current on this thread.
    pub fn new(driver: Driver, device: Device) -> Result<Arc<Self>, CudaError> {
        // SAFETY: the device was enumerated by the driver, which is started.
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

    /// Those made through this value that may take long.
    pub(super) fn calls(&self) -> &DriverCalls {
        &self.calls
    }

    /// Makes it current on the calling thread.
    pub fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context is alive as long as this value.
        unsafe { result::ctx::set_current(self.raw) }.named("cuCtxSetCurrent")
    }

    /// Lets work of this context reach the memory of another GPU's, where the two can.
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

    /// Bytes of the GPU's memory that nobody has taken.
    pub fn free_bytes(&self) -> Result<u64, CudaError> {
        self.bind()?;
        let (free, _) = result::mem_get_info().named("cuMemGetInfo")?;
        Ok(free as u64)
    }

    /// Bytes that this process has allocated. What others do on the GPU meanwhile does not show in it,
    /// as it would in a difference of free bytes.
    pub fn taken_bytes(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    pub(super) fn count_taken(&self, bytes: u64) {
        self.taken.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn count_given_back(&self, bytes: u64) {
        self.taken.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Waits for everything. For start and end only.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.bind()?;
        self.count_wait();
        result::ctx::synchronize().named("cuCtxSynchronize")
    }

    /// How often the host waited for the device so far: once a step is the aim.
    pub fn waits(&self) -> u64 {
        self.waits.load(Ordering::Relaxed)
    }

    pub(super) fn count_wait(&self) {
        self.waits.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // A context that a fault has ended cannot be released any better.
        // SAFETY: retained once in `new`; everything made in it holds it and is gone.
        let _ = unsafe { result::primary_ctx::release(self.device.raw) };
    }
}

/// What a stream is for.
pub trait Role: 'static {}

/// Copies to the device.
#[derive(Debug)]
pub enum HostToDevice {}
/// Kernels.
#[derive(Debug)]
pub enum Compute {}
/// Copies to the host.
#[derive(Debug)]
pub enum DeviceToHost {}

impl Role for HostToDevice {}
impl Role for Compute {}
impl Role for DeviceToHost {}

/// An ordered queue of work, never the default one (which orders itself with all others).
#[derive(Debug)]
pub struct Stream<R: Role> {
    raw: sys::CUstream,
    context: Arc<Context>,
    role: PhantomData<fn() -> R>,
}

// SAFETY: the driver lets every thread use a stream.
unsafe impl<R: Role> Send for Stream<R> {}
// SAFETY: as above.
unsafe impl<R: Role> Sync for Stream<R> {}

impl<R: Role> Stream<R> {
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        context.bind()?;
        let kind = result::stream::StreamKind::NonBlocking;
        let raw = result::stream::create(kind).named("cuStreamCreate")?;
        Ok(Self { raw, context: Arc::clone(context), role: PhantomData })
    }

    /// One whose kernels begin before those of others that wait for room as well.
    pub fn urgent(context: &Arc<Context>) -> Result<Self, CudaError> {
        context.bind()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: two numbers are written; a context is bound.
        unsafe { sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest) }
            .result()
            .named("cuCtxGetStreamPriorityRange")?;
        let kind = result::stream::StreamKind::NonBlocking;
        let raw = result::stream::create_with_priority(kind, greatest)
            .named("cuStreamCreateWithPriority")?;
        Ok(Self { raw, context: Arc::clone(context), role: PhantomData })
    }

    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Waits until all of its work is done. For start and end only.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.context.bind()?;
        self.context.count_wait();
        // SAFETY: the stream is alive.
        unsafe { result::stream::synchronize(self.raw) }.named("cuStreamSynchronize")
    }

    /// Work put here from now on begins after what the event stands for.
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both are alive; the driver keeps what it needs of the event.
        unsafe { result::stream::wait_event(self.raw, event.raw, flags) }.named("cuStreamWaitEvent")
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }
}

impl<R: Role> Drop for Stream<R> {
    fn drop(&mut self) {
        // SAFETY: it is destroyed once; the driver ends its work first. A failure means that a fault
        // ended the context, and nothing is left to give back.
        let _ = unsafe { result::stream::destroy(self.raw) };
    }
}

/// A mark in a stream's work.
#[derive(Debug)]
pub struct Event {
    raw: sys::CUevent,
    context: Arc<Context>,
}

// SAFETY: the driver lets every thread use an event.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// For order alone.
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        Self::with(context, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// One that time can be read from, at some cost.
    pub fn timed(context: &Arc<Context>) -> Result<Self, CudaError> {
        Self::with(context, sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn with(context: &Arc<Context>, flags: sys::CUevent_flags) -> Result<Self, CudaError> {
        context.bind()?;
        let raw = result::event::create(flags).named("cuEventCreate")?;
        Ok(Self { raw, context: Arc::clone(context) })
    }

    /// Stands for all work put into the stream so far.
    pub fn record<R: Role>(&self, stream: &Stream<R>) -> Result<(), CudaError> {
        // SAFETY: both are alive.
        unsafe { result::event::record(self.raw, stream.raw) }.named("cuEventRecord")
    }

    /// True when that work is done, or nothing was recorded.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: the event is alive.
        match unsafe { result::event::query(self.raw) } {
            Ok(()) => Ok(true),
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            Err(error) => Err(CudaError::driver("cuEventQuery", error)),
        }
    }

    /// Makes the host wait for that work.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.context.count_wait();
        // SAFETY: the event is alive.
        unsafe { result::event::synchronize(self.raw) }.named("cuEventSynchronize")
    }

    /// Milliseconds between two [`timed`](Self::timed) events whose work is done.
    pub fn milliseconds_since(&self, begin: &Event) -> Result<f32, CudaError> {
        // SAFETY: both are alive; others than timed and done ones are answered with an error.
        unsafe { result::event::elapsed(begin.raw, self.raw) }.named("cuEventElapsedTime")
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: destroyed once. As with streams, a failure leaves nothing to do.
        let _ = unsafe { result::event::destroy(self.raw) };
    }
}
