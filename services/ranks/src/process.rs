//! Process control beyond the standard library, and a clock shared by all processes of a machine.

use std::{
    ffi::CString,
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    time::{Duration, Instant},
};

/// Handle of a process (pidfd), which stays valid when the process id is reused.
#[derive(Debug)]
pub(crate) struct ProcessHandle {
    descriptor: OwnedFd,
}

impl ProcessHandle {
    /// Opens the handle of a child. The child must not have been waited for, or its id may be
    /// reused.
    pub(crate) fn of_child(id: u32) -> io::Result<Self> {
        let id =
            libc::pid_t::try_from(id).map_err(|_| io::Error::from_raw_os_error(libc::ESRCH))?;
        // SAFETY: plain numbers.
        let descriptor = unsafe { libc::syscall(libc::SYS_pidfd_open, id, 0) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        let descriptor = descriptor as libc::c_int;
        // SAFETY: the call returned this descriptor, and nothing else owns it.
        Ok(Self { descriptor: unsafe { OwnedFd::from_raw_fd(descriptor) } })
    }

    /// Sends SIGKILL, which ends a stopped process too. No effect on an ended process.
    pub(crate) fn kill(&self) {
        let descriptor = self.descriptor.as_raw_fd();
        let no_info = std::ptr::null::<libc::siginfo_t>();
        // SAFETY: the descriptor is open, the rest are plain numbers and the null that means "as
        // kill would".
        unsafe {
            libc::syscall(libc::SYS_pidfd_send_signal, descriptor, libc::SIGKILL, no_info, 0);
        }
    }
}

/// Makes the kernel kill this process when its parent dies.
///
/// # Errors
/// When the parent is not the process `parent`, or is no longer.
pub(crate) fn die_with_parent(parent: u32) -> io::Result<()> {
    // SAFETY: plain numbers.
    if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // The parent may have died before the call.
    if std::os::unix::process::parent_id() != parent {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    Ok(())
}

/// Ignores the stop signals: the parent receives them too and stops this process in order.
pub(crate) fn ignore_stop_signals() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: ignoring a signal runs no code of ours.
        unsafe {
            libc::signal(signal, libc::SIG_IGN);
        }
    }
}

/// Sets the name of this process in process lists; the first 15 bytes count.
pub(crate) fn set_name(name: &str) {
    let Ok(name) = CString::new(name) else { return };
    // SAFETY: the string ends with a zero and outlives the call, which copies it.
    unsafe {
        libc::prctl(libc::PR_SET_NAME, name.as_ptr());
    }
}

/// Returns CLOCK_MONOTONIC (the clock of [`Instant`]) in nanoseconds, which is the same in every
/// process of this machine.
pub fn clock_nanos() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one `timespec` to `time`.
    unsafe {
        libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time);
    }
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Converter between [`Instant`] and [`clock_nanos`], so that another process can convert back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedClock {
    instant: Instant,
    nanos: u64,
}

impl SharedClock {
    pub(crate) fn new() -> Self {
        Self { instant: Instant::now(), nanos: clock_nanos() }
    }

    pub(crate) fn nanos(&self, at: Instant) -> u64 {
        match at.checked_duration_since(self.instant) {
            Some(later) => self.nanos.saturating_add(later.as_nanos() as u64),
            None => self.nanos.saturating_sub((self.instant - at).as_nanos() as u64),
        }
    }

    /// Converts nanoseconds to an `Instant`. Values out of range become the time of
    /// [`SharedClock::new`].
    pub(crate) fn instant(&self, nanos: u64) -> Instant {
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
    fn kill_ends_a_child_and_has_no_effect_on_an_ended_child() {
        let mut child = Command::new("sleep").arg("3600").stdin(Stdio::null()).spawn().unwrap();
        let process = ProcessHandle::of_child(child.id()).unwrap();
        process.kill();
        assert!(!child.wait().unwrap().success());
        process.kill();
    }

    #[test]
    fn instants_round_trip_through_the_common_clock() {
        let (here, there) = (SharedClock::new(), SharedClock::new());
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
