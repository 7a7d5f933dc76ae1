//! One configuration for every Baton service.
//!
//! A setting is declared once, in [`schema`], with its type, default, the reason for the default and
//! its limits. From that one declaration come the TOML key, the flag, the environment variable, the
//! help text and the check:
//!
//! | key | flag | environment |
//! | --- | --- | --- |
//! | `node.step_tokens` | `--node-step-tokens` | `BATON_NODE_STEP_TOKENS` |
//!
//! Flags win over the environment, the environment over the file, the file over the defaults.
//! A key that does not exist is refused with the nearest one that does. A value that is not allowed
//! is refused with the key, the value, what is allowed, and where it came from; all problems are
//! reported at once.
//!
//! * `main` calls [`from_process`]; it alone reads the process's arguments and environment.
//! * Tests and everything else call [`Config::load`] with maps.
//! * [`hub`] finds models in the hub's cache; [`cache_folder`] is our own.
//! * [`Config::explain`] lists each value with its source. Secrets are never printed.
//!
//! Left out: what the values mean. Each service turns its section into its own types.

#![forbid(unsafe_code)]

mod cache;
mod check;
mod command_line;
mod error;
mod explain;
mod file;
pub mod hub;
mod load;
pub mod schema;
mod section;
mod types;
mod value;

pub use cache::cache_folder;
pub use command_line::{Started, args_for, environment_of, from_matches, from_process};
pub use error::{ConfigError, Problem, Source};
pub use explain::{Explained, Explanation};
pub use load::{Config, Environment, Flags, LoadInput, Section};
pub use schema::{Cluster, Model, Node, Router, Telemetry, Transfer};
pub use section::Setting;
pub use types::{
    ByteSize, CpuList, Device, Dtype, EtcdPrefix, EtcdUrl, GrpcUrl, HubModel, Isa, LoadFormat,
    LogFormat, ModelPath, Pair, Password, Secret, Speculate, ToolFormat, Transport,
    format_duration, parse_duration, parts_of,
};
