//! CPU affinity of threads.

use std::{io, marker::PhantomData};

/// Exclusive upper bound of CPU numbers.
pub const CPUS_MAX: u32 = 8192;

const WORDS: usize = CPUS_MAX as usize / u64::BITS as usize;

/// One bit per CPU, as in the kernel's interface.
type Mask = [u64; WORDS];

fn mask_of(cpus: &[u32]) -> io::Result<Mask> {
    let mut mask = [0; WORDS];
    for cpu in cpus {
        let word = mask.get_mut((cpu / u64::BITS) as usize).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidInput, format!("there is no CPU {cpu}"))
        })?;
        *word |= 1 << (cpu % u64::BITS);
    }
    Ok(mask)
}

/// Returns the CPUs that the calling thread may run on, in order.
pub fn allowed() -> io::Result<Vec<u32>> {
    let mask = get()?;
    Ok((0..CPUS_MAX).filter(|cpu| mask[(cpu / 64) as usize] >> (cpu % 64) & 1 == 1).collect())
}

/// Guard that confines the calling thread to some CPUs. Dropping it restores the previous CPUs.
/// Threads that the confined thread starts stay confined.
#[derive(Debug)]
pub struct ConfinedThread {
    before: Box<Mask>,
    /// The guard must not leave its thread.
    _not_send: PhantomData<*const ()>,
}

/// Confines the calling thread to `cpus`.
///
/// # Errors
/// The system's error: none of the CPUs exists or may be used, or this system has no thread
/// affinity.
pub fn confine(cpus: &[u32]) -> io::Result<ConfinedThread> {
    let before = Box::new(get()?);
    set(&mask_of(cpus)?)?;
    Ok(ConfinedThread { before, _not_send: PhantomData })
}

/// Pins the calling thread to `cpus` permanently.
pub(crate) fn pin(cpus: &[u32]) -> io::Result<()> {
    set(&mask_of(cpus)?)
}

impl Drop for ConfinedThread {
    fn drop(&mut self) {
        // The thread could run on these CPUs before. When the system has taken them away meanwhile,
        // the thread keeps its present CPUs.
        let _ = set(&self.before);
    }
}

#[cfg(target_os = "linux")]
fn get() -> io::Result<Mask> {
    let mut mask: Mask = [0; WORDS];
    // SAFETY: the mask has the length that is passed, and any bits make a valid mask. 0 is the
    // calling thread.
    let status = unsafe {
        libc::sched_getaffinity(0, size_of::<Mask>(), mask.as_mut_ptr().cast::<libc::cpu_set_t>())
    };
    if status == 0 { Ok(mask) } else { Err(io::Error::last_os_error()) }
}

#[cfg(target_os = "linux")]
fn set(mask: &Mask) -> io::Result<()> {
    // SAFETY: the mask has the length that is passed and is only read. 0 is the calling thread.
    let status = unsafe {
        libc::sched_setaffinity(0, size_of::<Mask>(), mask.as_ptr().cast::<libc::cpu_set_t>())
    };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(not(target_os = "linux"))]
fn get() -> io::Result<Mask> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(not(target_os = "linux"))]
fn set(_: &Mask) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn confinement_ends_with_the_guard_but_child_threads_stay_confined() {
        let all = allowed().unwrap();
        let last = *all.last().unwrap();
        let confined = confine(&[last]).unwrap();
        assert_eq!(allowed().unwrap(), [last]);
        let (told, child) = std::sync::mpsc::channel::<()>();
        let child_runs = std::thread::spawn(move || {
            // Blocks until the parent is unconfined again.
            let _ = child.recv();
            allowed().unwrap()
        });
        drop(confined);
        assert_eq!(allowed().unwrap(), all);
        drop(told);
        assert_eq!(child_runs.join().unwrap(), [last]);
    }

    #[test]
    fn missing_cpus_are_rejected_and_change_nothing() {
        let all = allowed().unwrap();
        for cpus in [&[][..], &[CPUS_MAX], &[CPUS_MAX - 1]] {
            assert!(confine(cpus).is_err(), "{cpus:?}");
            assert_eq!(allowed().unwrap(), all);
        }
    }
}
