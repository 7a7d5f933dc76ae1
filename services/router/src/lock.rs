//! The lock of all mutexes.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, never across an await. A task that panicked meanwhile fails its own request only.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
