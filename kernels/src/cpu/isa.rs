//! Which instructions the CPU backend uses, found at run time.

use std::fmt;

/// The instructions that a backend may use. All but `Auto` are exact: a backend made with one of
/// them runs that code or does not come to be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Isa {
    /// The fastest that this machine has.
    #[default]
    Auto,
    /// AVX-512 with `vdpbf16ps` for bf16 matrix products. f32 backends run as `Avx512`.
    Avx512Bf16,
    /// AVX-512 (F, BW, DQ, VL); bf16 weights are widened to f32.
    Avx512,
    /// Nothing assumed: plain Rust that the compiler vectorises, for AVX2 with FMA where that is
    /// found, else for the compiler's target.
    Portable,
    /// The plain f32 loops that define every operation. Single-threaded and slow.
    Reference,
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Auto => "auto",
            Isa::Avx512Bf16 => "avx512-bf16",
            Isa::Avx512 => "avx512",
            Isa::Portable => "portable",
            Isa::Reference => "reference",
        })
    }
}

/// What the chosen [`Isa`] came to on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    Reference,
    /// The compiler's target.
    Baseline,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
}

/// True when multiply-add is one instruction at [`Level::Baseline`], so that using it is cheap.
pub(crate) const BASELINE_FUSES: bool =
    cfg!(target_feature = "fma") || cfg!(target_arch = "aarch64");

impl Level {
    /// The level for a wish, or the features that are missing for it.
    pub fn find(isa: Isa) -> Result<Self, Vec<&'static str>> {
        match isa {
            Isa::Reference => Ok(Level::Reference),
            Isa::Portable => Ok(portable()),
            Isa::Auto => {
                Ok(avx512_bf16().or_else(|_| avx512()).unwrap_or_else(|_missing| portable()))
            }
            Isa::Avx512 => avx512(),
            Isa::Avx512Bf16 => avx512_bf16(),
        }
    }

    /// The name to show: the [`Isa`], more exactly where that matters.
    pub fn name(self) -> &'static str {
        match self {
            Level::Reference => "reference",
            Level::Baseline => "portable",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "portable (avx2)",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Bf16 => "avx512-bf16",
        }
    }

    /// Runs `work`, inlined into a function compiled for this level, so that plain loops in it
    /// become this level's vectors. Results are the same at every level: the compiler neither
    /// reorders nor fuses floating-point operations.
    #[inline(always)]
    pub fn run<R>(self, work: impl FnOnce() -> R) -> R {
        match self {
            Level::Reference | Level::Baseline => work(),
            // SAFETY: a `Level` is made by `find` alone, which saw these features on this machine.
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => unsafe { with_avx2(work) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 | Level::Avx512Bf16 => unsafe { with_avx512(work) },
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn with_avx2<R>(work: impl FnOnce() -> R) -> R {
    work()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
fn with_avx512<R>(work: impl FnOnce() -> R) -> R {
    work()
}

#[cfg(target_arch = "x86_64")]
macro_rules! missing {
    ($($feature:tt),+) => {{
        let mut missing = Vec::new();
        $(if !std::arch::is_x86_feature_detected!($feature) {
            missing.push($feature);
        })+
        missing
    }};
}

#[cfg(target_arch = "x86_64")]
fn portable() -> Level {
    if missing!("avx2", "fma").is_empty() { Level::Avx2 } else { Level::Baseline }
}

#[cfg(target_arch = "x86_64")]
fn avx512() -> Result<Level, Vec<&'static str>> {
    let missing = missing!("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl");
    if missing.is_empty() { Ok(Level::Avx512) } else { Err(missing) }
}

#[cfg(target_arch = "x86_64")]
fn avx512_bf16() -> Result<Level, Vec<&'static str>> {
    let missing =
        missing!("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16");
    if missing.is_empty() { Ok(Level::Avx512Bf16) } else { Err(missing) }
}

#[cfg(not(target_arch = "x86_64"))]
fn portable() -> Level {
    Level::Baseline
}

#[cfg(not(target_arch = "x86_64"))]
fn avx512() -> Result<Level, Vec<&'static str>> {
    Err(vec!["an x86-64 processor"])
}

#[cfg(not(target_arch = "x86_64"))]
fn avx512_bf16() -> Result<Level, Vec<&'static str>> {
    avx512()
}
