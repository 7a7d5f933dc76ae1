//! Which process this is, to the others of its host.

use std::sync::OnceLock;

/// Random, made once: containers of one host count their processes from 1 each.
pub fn mark() -> u128 {
    static MARK: OnceLock<u128> = OnceLock::new();
    *MARK.get_or_init(|| {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).expect("the system has random numbers");
        u128::from_le_bytes(bytes)
    })
}
