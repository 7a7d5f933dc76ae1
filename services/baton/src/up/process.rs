//! Two process system calls that the standard library does not offer.

use tokio::process::Command;

/// Makes the kernel send SIGTERM to the child when this process dies, so that a killed `baton up`
/// leaves no nodes behind.
///
/// The signal follows the *thread* that spawned the child; `up` spawns from its main thread only.
pub(super) fn die_with_parent(command: &mut Command) {
    // SAFETY: between fork and exec only async-signal-safe calls are made: prctl and getppid are,
    // and building an error from a number or a constant does not allocate.
    unsafe {
        let parent = libc::getpid();
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            // The parent may have died before the call above.
            if libc::getppid() != parent {
                return Err(std::io::Error::from_raw_os_error(libc::ESRCH));
            }
            Ok(())
        });
    }
}

/// Sends SIGTERM to a child. The caller has not reaped the child yet, so the id is not reused.
pub(super) fn send_terminate(child_id: u32) {
    // SAFETY: kill takes plain numbers; the id belongs to an unreaped child of this process.
    unsafe {
        libc::kill(child_id as libc::pid_t, libc::SIGTERM);
    }
}
