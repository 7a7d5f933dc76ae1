//! Identifies this process to other processes of its host.

use std::sync::OnceLock;

/// Returns a random id of this process. Process ids of containers on one host are not unique.
pub fn mark() -> u128 {
    static MARK: OnceLock<u128> = OnceLock::new();
    *MARK.get_or_init(|| {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).expect("the system has random numbers");
        u128::from_le_bytes(bytes)
    })
}
