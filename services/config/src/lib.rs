//! One configuration for every Baton service.
//!
//! [`schema`] declares each setting once, with type, default, reason for the default and limits.
//! TOML key, flag, environment variable, help text and validation derive from this declaration:
//!
//! | key | flag | environment |
//! | --- | --- | --- |
//! | `node.step_tokens` | `--node-step-tokens` | `BATON_NODE_STEP_TOKENS` |
//!
//! Flags win over the environment, the environment over the file, the file over the defaults. An
//! unknown key is an error that names the nearest valid key. An invalid value is an error with key,
//! value, allowed values and source. All problems are reported at once. A renamed setting keeps its
//! former name until the next minor version; [`Config::warnings`] lists the uses of former names,
//! and secrets that cross a network unencrypted or that every user of the machine can read.
//!
//! * `main` calls [`from_process`], the only function that reads the process's arguments and
//!   environment.
//! * All other callers, such as tests, call [`Config::load`] with maps.
//! * [`hub`] finds models in the cache of the Hugging Face hub; [`cache_folder`] returns Baton's
//!   own cache.
//! * [`json_schema`] describes the file, for editors and for Helm charts.
//! * [`Config::explain`] lists each value with its source. Secrets are never printed.
//!
//! The crate does not interpret the values: each service converts its sections into its own types.

#![forbid(unsafe_code)]

mod check;
mod command_line;
mod error;
mod explain;
mod file;
pub mod hub;
mod input;
mod json_schema;
mod load;
mod reader;
pub mod schema;
mod section;
mod types;
mod value;

pub use command_line::{ProcessConfig, args_for, environment_of, from_matches, from_process};
pub use error::{ConfigError, Problem, Source};
pub use input::{Environment, Flags, LoadInput, cache_folder};
pub use json_schema::json_schema;
pub use load::{Config, Section};
pub use schema::{Cluster, Model, Node, Router, Telemetry, Tier, Transfer, Weights};
pub use section::Setting;
pub use types::{
    Auto, ByteSize, CpuList, Device, Disaggregate, Dtype, EtcdPrefix, GrpcUrl, HubModel, Isa,
    KvDtype, LoadFormat, LogFormat, ModelPath, NodePolicy, NodeUrl, Origin, Pair, Password,
    ReasoningFormatName, Roles, Secret, ServerUrl, SpecialTokensInContent, Speculate,
    TierAdmission, ToolFormatName, Transport, WeightPlace, format_duration, parse_duration,
    parts_of,
};
