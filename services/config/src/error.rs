//! Errors of a configuration, and sources of its values.

use std::{fmt, io, path::PathBuf};

/// The source of a value, in rising precedence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    Default,
    File { path: PathBuf, line: usize },
    Environment { name: String },
    Flag { name: String },
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line } => write!(f, "{} line {line}", path.display()),
            Self::Environment { name } => write!(f, "environment {name}"),
            Self::Flag { name } => write!(f, "flag --{name}"),
        }
    }
}

/// All problems of a configuration, at least one.
#[derive(Debug, thiserror::Error)]
#[error("{}", problems.iter().map(Problem::to_string).collect::<Vec<_>>().join("\n"))]
pub struct ConfigError {
    pub problems: Vec<Problem>,
}

impl From<Problem> for ConfigError {
    fn from(problem: Problem) -> Self {
        Self { problems: vec![problem] }
    }
}

/// One problem.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    #[error("cannot read {path}: {reason}", path = path.display())]
    FileUnreadable { path: PathBuf, reason: io::Error },
    #[error("{path} is too large; a configuration file has at most {bytes_max} bytes", path = path.display())]
    FileTooLarge { path: PathBuf, bytes_max: u64 },
    #[error("{path} line {line} is not TOML: {reason}", path = path.display())]
    FileNotToml { path: PathBuf, line: usize, reason: String },
    #[error("unknown key {key} ({source_}); the nearest valid key is {nearest}")]
    UnknownKey { key: String, nearest: String, source_: Source },
    #[error("unknown section [{section}] ({source_}); the nearest valid section is [{nearest}]")]
    UnknownSection { section: String, nearest: String, source_: Source },
    /// Invalid value; `(hidden)` replaces the value of a secret.
    #[error("invalid {key}: {value} ({source_}); allowed: {allowed}")]
    BadValue { key: String, value: String, allowed: String, source_: Source },
    #[error("{key} is not set; give flag --{flag}, environment {env}, or the key in the file")]
    Missing { key: String, flag: String, env: String },
    /// Values that exclude each other.
    #[error("{message}")]
    Conflict { message: String },
}
