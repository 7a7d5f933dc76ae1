//! Which CPUs a thread may run on.

use std::{io, marker::PhantomData};

/// CPU numbers are below it.
pub const CPUS_MAX: u32 = 8192;

const WORDS: usize = CPUS_MAX as usize / u64::BITS as usize;

/// One bit a CPU, as the kernel has it.
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

/// The CPUs that the calling thread may run on, in order.
pub fn allowed() -> io::Result<Vec<u32>> {
    let mask = get()?;
    Ok((0..CPUS_MAX).filter(|cpu| mask[(cpu / 64) as usize] >> (cpu % 64) & 1 == 1).collect())
}

/// While it lives, the thread that made it runs on its CPUs alone, and threads that this one starts
/// do so for good. Dropping it gives the thread its old CPUs back.
#[derive(Debug)]
pub struct Confined {
    before: Box<Mask>,
    /// Belongs to its thread.
    _not_send: PhantomData<*const ()>,
}

/// Confines the calling thread.
///
/// # Errors
/// The system's: none of the CPUs exists or may be used, or threads cannot be tied to CPUs here.
pub fn confine(cpus: &[u32]) -> io::Result<Confined> {
    let before = Box::new(get()?);
    set(&mask_of(cpus)?)?;
    Ok(Confined { before, _not_send: PhantomData })
}

/// Ties the calling thread to these CPUs for good.
pub(crate) fn pin(cpus: &[u32]) -> io::Result<()> {
    set(&mask_of(cpus)?)
}

impl Drop for Confined {
    fn drop(&mut self) {
        // It ran there before. Where CPUs were taken from us meanwhile, it stays where it is.
        let _ = set(&self.before);
    }
}

#[cfg(target_os = "linux")]
fn get() -> io::Result<Mask> {
    let mut mask: Mask = [0; WORDS];
    // SAFETY: the mask has as many bytes as are named, and any bits make a valid mask. 0 is the
    // calling thread.
    let status = unsafe {
        libc::sched_getaffinity(0, size_of::<Mask>(), mask.as_mut_ptr().cast::<libc::cpu_set_t>())
    };
    if status == 0 { Ok(mask) } else { Err(io::Error::last_os_error()) }
}

#[cfg(target_os = "linux")]
fn set(mask: &Mask) -> io::Result<()> {
    // SAFETY: as above; the mask is only read.
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
    fn a_thread_is_confined_until_the_guard_goes_and_its_children_for_good() {
        let all = allowed().unwrap();
        let last = *all.last().unwrap();
        let confined = confine(&[last]).unwrap();
        assert_eq!(allowed().unwrap(), [last]);
        let (told, child) = std::sync::mpsc::channel::<()>();
        let child_runs = std::thread::spawn(move || {
            // Until the parent is free again.
            let _ = child.recv();
            allowed().unwrap()
        });
        drop(confined);
        assert_eq!(allowed().unwrap(), all);
        drop(told);
        assert_eq!(child_runs.join().unwrap(), [last]);
    }

    #[test]
    fn cpus_that_are_not_there_are_refused_and_change_nothing() {
        let all = allowed().unwrap();
        for cpus in [&[][..], &[CPUS_MAX], &[CPUS_MAX - 1]] {
            assert!(confine(cpus).is_err(), "{cpus:?}");
            assert_eq!(allowed().unwrap(), all);
        }
    }
}
