//! Which instructions the CPU backend uses, found at run time.

use std::fmt;
#[cfg(target_arch = "x86_64")]
use std::sync::OnceLock;

/// The instructions that a backend may use. All but `Auto` are exact: a backend made with one of
/// them runs that code or does not come to be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Isa {
    /// The fastest that this machine has.
    #[default]
    Auto,
    /// AMX tiles for bf16 matrix products of several rows, the rest as `Avx512`. Linux only.
    Amx,
    /// AVX-512 with `vdpbf16ps` for bf16 matrix products. f32 backends run as `Avx512`.
    Avx512Bf16,
    /// AVX-512 (F, BW, DQ, VL); bf16 weights are widened to f32.
    Avx512,
    /// AVX2 with FMA and F16C; bf16 weights are widened to f32.
    Avx2,
    /// Nothing assumed: plain Rust that the compiler vectorises for its target.
    Portable,
    /// The plain f32 loops that define every operation. Single-threaded and slow.
    Reference,
}

impl Isa {
    /// From the fastest on; what a machine runs comes with the first that it has.
    pub const ALL: [Isa; 7] = [
        Isa::Auto,
        Isa::Amx,
        Isa::Avx512Bf16,
        Isa::Avx512,
        Isa::Avx2,
        Isa::Portable,
        Isa::Reference,
    ];

    /// The word for people and settings.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Auto => "auto",
            Isa::Amx => "amx",
            Isa::Avx512Bf16 => "avx512-bf16",
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Portable => "portable",
            Isa::Reference => "reference",
        }
    }

    /// The one with this [`Self::name`].
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|isa| isa.name() == name)
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
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
    #[cfg(target_arch = "x86_64")]
    Amx,
}

/// True when multiply-add is one instruction at [`Level::Baseline`], so that using it is cheap.
pub(crate) const BASELINE_FUSES: bool =
    cfg!(target_feature = "fma") || cfg!(target_arch = "aarch64");

impl Level {
    /// The level for a wish, or the features that are missing for it.
    pub fn find(isa: Isa) -> Result<Self, Vec<&'static str>> {
        match isa {
            Isa::Reference => Ok(Level::Reference),
            Isa::Portable => Ok(Level::Baseline),
            Isa::Auto => Ok(fastest()),
            Isa::Amx => amx(),
            Isa::Avx512 => avx512(),
            Isa::Avx512Bf16 => avx512_bf16(),
            Isa::Avx2 => avx2(),
        }
    }

    /// The [`Isa`]'s name.
    pub fn name(self) -> &'static str {
        match self {
            Level::Reference => "reference",
            Level::Baseline => "portable",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Bf16 => "avx512-bf16",
            #[cfg(target_arch = "x86_64")]
            Level::Amx => "amx",
        }
    }
}

/// Defines a function with a `level: Level` before its other parameters, whose body is compiled
/// once for every level, so that plain loops in it (and in what is `inline(always)` inside them)
/// become this level's vectors. Results are the same at every level: the compiler neither reorders
/// nor fuses floating-point operations.
macro_rules! per_level {
    ($(#[$attribute:meta])* $visibility:vis fn $name:ident(
        $($argument:ident: $type:ty),* $(,)?
    ) $(-> $output:ty)? $body:block) => {
        $(#[$attribute])*
        $visibility fn $name(level: $crate::cpu::isa::Level, $($argument: $type),*) $(-> $output)? {
            use $crate::cpu::isa::Level;

            #[inline(always)]
            fn plain($($argument: $type),*) $(-> $output)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($argument: $type),*) $(-> $output)? {
                plain($($argument),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
            fn avx512($($argument: $type),*) $(-> $output)? {
                plain($($argument),*)
            }

            match level {
                Level::Reference | Level::Baseline => plain($($argument),*),
                // SAFETY: a `Level` is made by `find` alone, which saw these features here.
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => unsafe { avx2($($argument),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 | Level::Avx512Bf16 | Level::Amx => unsafe {
                    avx512($($argument),*)
                },
            }
        }
    };
}
pub(crate) use per_level;

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
fn avx2() -> Result<Level, Vec<&'static str>> {
    let missing = missing!("avx2", "fma", "f16c");
    if missing.is_empty() { Ok(Level::Avx2) } else { Err(missing) }
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

#[cfg(target_arch = "x86_64")]
fn amx() -> Result<Level, Vec<&'static str>> {
    avx512()?;
    if super::matmul::amx::request() { Ok(Level::Amx) } else { Err(vec!["amx-bf16"]) }
}

/// Who made the processor, and its family: what the features do not tell.
#[cfg(target_arch = "x86_64")]
fn maker() -> ([u8; 12], u32) {
    use std::arch::x86_64::__cpuid;
    // Asking costs microseconds in a virtual machine.
    static MAKER: OnceLock<([u8; 12], u32)> = OnceLock::new();
    *MAKER.get_or_init(|| {
        let (vendor, signature) = (__cpuid(0), __cpuid(1).eax);
        let mut name = [0; 12];
        let words = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
        name.copy_from_slice(words.as_flattened());
        (name, (signature >> 8 & 0xf) + (signature >> 20 & 0xff))
    })
}

/// How products of few rows, for which memory is the limit, read weights: several panels side by
/// side with lines fetched ahead of their use (true), or one panel after another, left to the
/// hardware, which Zen 4 does better. The products of one token of SmolLM2-135M on two cores, in ms
/// with true and with false: Xeon with AMX bf16 8.3 and 12.9, q8 4.3 and 5.2; Zen 4 bf16 10.4 and
/// 8.5, q8 6.4 and 4.6.
#[cfg(target_arch = "x86_64")]
pub(crate) fn fetches_ahead() -> bool {
    const ZEN_3_AND_4: u32 = 0x19;
    maker() != (*b"AuthenticAMD", ZEN_3_AND_4)
}

/// Tiles beat everything. `vdpbf16ps` is the next best where it is as quick as an FMA, which is on
/// AMD's cores; Intel's take two cycles for it.
#[cfg(target_arch = "x86_64")]
fn fastest() -> Level {
    let is_intel = maker().0 == *b"GenuineIntel";
    let pairs = if is_intel { Err(Vec::new()) } else { avx512_bf16() };
    let found = amx().or(pairs).or_else(|_| avx512()).or_else(|_| avx2());
    found.unwrap_or(Level::Baseline)
}

#[cfg(not(target_arch = "x86_64"))]
fn avx2() -> Result<Level, Vec<&'static str>> {
    avx512()
}

#[cfg(not(target_arch = "x86_64"))]
fn avx512() -> Result<Level, Vec<&'static str>> {
    Err(vec!["an x86-64 processor"])
}

#[cfg(not(target_arch = "x86_64"))]
fn fastest() -> Level {
    Level::Baseline
}

#[cfg(not(target_arch = "x86_64"))]
fn amx() -> Result<Level, Vec<&'static str>> {
    avx512()
}

#[cfg(not(target_arch = "x86_64"))]
fn avx512_bf16() -> Result<Level, Vec<&'static str>> {
    avx512()
}
