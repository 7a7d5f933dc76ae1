//! The types that settings have beyond those of the standard library.

mod byte_size;
mod choice;
mod duration;
mod grpc_url;
mod secret;

pub use byte_size::ByteSize;
pub use choice::{ClusterKind, Dtype, LoadFormat, LogFormat};
pub use duration::{format_duration, parse_duration};
pub use grpc_url::GrpcUrl;
pub use secret::Secret;
