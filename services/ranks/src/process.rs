//! What the standard library does not offer about processes, and one clock for all of them.

use std::{
    ffi::CString,
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    time::{Duration, Instant},
};

/// A process that cannot be mistaken for a later one of the same number.
#[derive(Debug)]
pub struct Process {
    descriptor: OwnedFd,
}

impl Process {
    /// Of a child that has not been waited for, so that the number is still its own.
    pub fn of_child(id: u32) -> io::Result<Self> {
        let id =
            libc::pid_t::try_from(id).map_err(|_| io::Error::from_raw_os_error(libc::ESRCH))?;
        // SAFETY: plain numbers.
        let descriptor = unsafe { libc::syscall(libc::SYS_pidfd_open, id, 0) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        let descriptor = descriptor as libc::c_int;
        // SAFETY: the call gave us this descriptor, and it is nobody else's.
        Ok(Self { descriptor: unsafe { OwnedFd::from_raw_fd(descriptor) } })
    }

    /// Ends it, whatever it does; also one that is stopped. One that is gone stays so.
    pub fn kill(&self) {
        let descriptor = self.descriptor.as_raw_fd();
        let no_info = std::ptr::null::<libc::siginfo_t>();
        // SAFETY: the descriptor is open, the rest are plain numbers and the null that means "as
        // kill would".
        unsafe {
            libc::syscall(libc::SYS_pidfd_send_signal, descriptor, libc::SIGKILL, no_info, 0);
        }
    }
}

/// This process is killed when its parent is gone, however that went.
///
/// # Errors
/// When the parent is not, or no longer, the process of that number.
pub fn die_with_parent(parent: u32) -> io::Result<()> {
    // SAFETY: plain numbers.
    if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // It may have gone before the call.
    if std::os::unix::process::parent_id() != parent {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    Ok(())
}

/// Leaves signals that mean "stop" to the parent, which gets them too and stops in order.
pub fn ignore_stop_signals() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: ignoring a signal runs no code of ours.
        unsafe {
            libc::signal(signal, libc::SIG_IGN);
        }
    }
}

/// What this process is called where processes are listed; the first 15 bytes count.
pub fn set_name(name: &str) {
    let Ok(name) = CString::new(name) else { return };
    // SAFETY: the string ends with a zero and outlives the call, which copies it.
    unsafe {
        libc::prctl(libc::PR_SET_NAME, name.as_ptr());
    }
}

/// The clock behind [`Instant`], in nanoseconds: the same number in every process of this machine.
pub fn clock_nanos() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` has room for what is written.
    unsafe {
        libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time);
    }
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Turns moments into that clock's numbers, and back in another process.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    instant: Instant,
    nanos: u64,
}

impl Clock {
    pub fn new() -> Self {
        Self { instant: Instant::now(), nanos: clock_nanos() }
    }

    pub fn nanos(&self, at: Instant) -> u64 {
        match at.checked_duration_since(self.instant) {
            Some(later) => self.nanos.saturating_add(later.as_nanos() as u64),
            None => self.nanos.saturating_sub((self.instant - at).as_nanos() as u64),
        }
    }

    /// Moments beyond all that can be are as good as now.
    pub fn instant(&self, nanos: u64) -> Instant {
        let moment = match nanos.checked_sub(self.nanos) {
            Some(later) => self.instant.checked_add(Duration::from_nanos(later)),
            None => self.instant.checked_sub(Duration::from_nanos(self.nanos - nanos)),
        };
        moment.unwrap_or(self.instant)
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_child_is_ended_by_its_handle_and_a_gone_one_is_left_alone() {
        let mut child = Command::new("sleep").arg("3600").stdin(Stdio::null()).spawn().unwrap();
        let process = Process::of_child(child.id()).unwrap();
        process.kill();
        assert!(!child.wait().unwrap().success());
        process.kill();
    }

    #[test]
    fn moments_come_back_from_the_common_clock() {
        let (here, there) = (Clock::new(), Clock::new());
        let now = Instant::now();
        for at in [now, now - Duration::from_millis(5), now + Duration::from_secs(60)] {
            let back = there.instant(here.nanos(at));
            let off = back.max(at) - back.min(at);
            // The clocks were read one after the other, each in two steps.
            assert!(off < Duration::from_secs(1), "{off:?}");
            assert_eq!(here.nanos(here.instant(here.nanos(at))), here.nanos(at));
        }
        let _ = (here.instant(0), here.instant(u64::MAX));
    }
}
