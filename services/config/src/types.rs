//! Types of settings that the standard library does not have.

mod auto;
mod byte_size;
mod choice;
mod cpu_list;
mod duration;
mod etcd;
mod format;
mod model_path;
mod origin;
mod pair;
mod secret;
mod url;

pub use auto::Auto;
pub use byte_size::ByteSize;
pub use choice::{
    Device, Disaggregate, Dtype, Isa, KvDtype, LoadFormat, LogFormat, NodePolicy, Roles,
    SpecialTokensInContent, Speculate, TierAdmission, Transport, WeightPlace,
};
pub use cpu_list::CpuList;
pub use duration::{format_duration, parse_duration};
pub use etcd::EtcdPrefix;
pub use format::{ReasoningFormatName, ToolFormatName};
pub(crate) use model_path::is_word;
pub use model_path::{HubModel, ModelPath, parts_of};
pub use origin::Origin;
pub use pair::Pair;
pub use secret::{Password, Secret};
pub use url::{GrpcUrl, NodeUrl, ServerUrl};
