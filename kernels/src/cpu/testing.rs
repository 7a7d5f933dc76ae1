//! Helpers for the tests of CPU operations.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use super::isa::{BASELINE_FUSES, Isa, Level};
use crate::shared::{RegionName, SharedRegion};

/// Returns a shared region for a group of threads that stand in for processes.
pub(crate) fn region(bytes: usize) -> Arc<SharedRegion> {
    static MADE: AtomicU32 = AtomicU32::new(0);
    let purpose = format!("test_{}", MADE.fetch_add(1, Ordering::Relaxed));
    SharedRegion::create(&RegionName::own(0x7e57, purpose), bytes).unwrap()
}

/// Returns every level that this machine supports, except the reference.
pub(crate) fn levels() -> Vec<Level> {
    Isa::ALL
        .into_iter()
        .filter(|isa| !matches!(isa, Isa::Auto | Isa::Reference))
        .filter_map(|isa| Level::find(isa).ok())
        .collect()
}

/// Returns whether the level multiplies bf16 in pairs, which rounds differently from the reference.
pub(crate) fn pairs(level: Level) -> bool {
    matches!(level.name(), "avx512-bf16" | "amx")
}

/// Returns whether the level fuses multiply-adds, as the reference does.
pub(crate) fn fuses(level: Level) -> bool {
    level != Level::Baseline || BASELINE_FUSES
}

/// Returns reproducible numbers between -1 and 1.
pub(crate) fn numbers(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 8_388_608.0 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
