//! Instruction sets of the CPU backend, detected at run time.

use std::fmt;
#[cfg(target_arch = "x86_64")]
use std::sync::OnceLock;

/// Instruction set that a backend uses. Except for `Auto`, a backend runs code for exactly this
/// instruction set, or its creation fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Isa {
    /// Fastest instruction set of this machine.
    #[default]
    Auto,
    /// AMX tiles for bf16 GEMMs of several rows, everything else as `Avx512`. Linux only.
    Amx,
    /// AVX-512 with `vdpbf16ps` for bf16 GEMMs. f32 backends run as `Avx512`.
    Avx512Bf16,
    /// AVX-512 (F, BW, DQ, VL); bf16 weights are widened to f32.
    Avx512,
    /// AVX2 with FMA and F16C; bf16 weights are widened to f32.
    Avx2,
    /// Plain Rust that the compiler vectorizes for its target.
    Portable,
    /// Plain f32 loops that define every operation. Single-threaded and slow.
    Reference,
}

impl Isa {
    /// All values, fastest first.
    pub const ALL: [Isa; 7] = [
        Isa::Auto,
        Isa::Amx,
        Isa::Avx512Bf16,
        Isa::Avx512,
        Isa::Avx2,
        Isa::Portable,
        Isa::Reference,
    ];

    /// Returns the name for settings and logs.
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

    /// Returns the value with this [`name`](Self::name).
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|isa| isa.name() == name)
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Instruction set that the kernels run with on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    Reference,
    /// Instruction set of the compiler's target.
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

/// Whether [`Level::Baseline`] has an FMA instruction. Without it, `mul_add` is a slow function
/// call.
pub(crate) const BASELINE_FUSES: bool =
    cfg!(target_feature = "fma") || cfg!(target_arch = "aarch64");

impl Level {
    /// Returns the level for `isa`, or the CPU features that the machine lacks.
    pub(crate) fn find(isa: Isa) -> Result<Self, Vec<&'static str>> {
        match isa {
            Isa::Reference => Ok(Level::Reference),
            Isa::Portable => Ok(Level::Baseline),
            #[cfg(target_arch = "x86_64")]
            Isa::Auto => Ok(fastest()),
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => amx(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => avx512_bf16(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2(),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Auto => Ok(Level::Baseline),
            #[cfg(not(target_arch = "x86_64"))]
            _ => Err(vec!["an x86-64 processor"]),
        }
    }

    /// Returns the [`Isa`]'s name.
    pub(crate) fn name(self) -> &'static str {
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

/// Defines a function whose body is compiled three times: for the compiler's target, AVX2 and
/// AVX-512. Its first parameter `level: Level` selects the copy. Plain loops in the body, and in
/// `inline(always)` functions that it calls, are vectorized for the copy's instruction set. All
/// copies give the same results: the compiler neither reorders nor fuses floating-point operations.
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
                // SAFETY: only `find` makes a `Level`, after it found these features on
                // this machine.
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => unsafe { avx2($($argument),*) },
                // SAFETY: only `find` makes a `Level`, after it found these features on this
                // machine.
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

/// Returns the processor's vendor and family, which the feature flags do not contain.
#[cfg(target_arch = "x86_64")]
fn maker() -> ([u8; 12], u32) {
    use std::arch::x86_64::__cpuid;
    // CPUID costs microseconds in a virtual machine, so the result is cached.
    static MAKER: OnceLock<([u8; 12], u32)> = OnceLock::new();
    *MAKER.get_or_init(|| {
        let (vendor, signature) = (__cpuid(0), __cpuid(1).eax);
        let mut name = [0; 12];
        let words = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
        name.copy_from_slice(words.as_flattened());
        (name, (signature >> 8 & 0xf) + (signature >> 20 & 0xff))
    })
}

/// Returns whether skinny GEMMs read several panels side by side with software prefetch. Otherwise
/// they read one panel after another with hardware prefetch only. Software prefetch is 1.2 to 1.6
/// times as fast on a Xeon with AMX, hardware prefetch 1.2 to 1.4 times as fast on Zen 4.
#[cfg(target_arch = "x86_64")]
pub(crate) fn uses_software_prefetch() -> bool {
    const ZEN_3_AND_4: u32 = 0x19;
    maker() != (*b"AuthenticAMD", ZEN_3_AND_4)
}

/// Returns the fastest level: AMX, AVX-512 with `vdpbf16ps`, AVX-512, AVX2, and then the baseline.
/// Intel's cores skip `vdpbf16ps`: there it has half the throughput of an FMA, on AMD's cores the
/// same.
#[cfg(target_arch = "x86_64")]
fn fastest() -> Level {
    let is_intel = maker().0 == *b"GenuineIntel";
    let bf16 = if is_intel { Err(Vec::new()) } else { avx512_bf16() };
    let found = amx().or(bf16).or_else(|_| avx512()).or_else(|_| avx2());
    found.unwrap_or(Level::Baseline)
}
