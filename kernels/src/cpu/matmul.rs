//! Matrix products with packed weights: `out[rows][n] = x[rows][k] · w[n][k]ᵀ`.

mod pack;
pub(crate) mod reference;

pub use pack::CpuMatrix;
pub(crate) use pack::pack;
