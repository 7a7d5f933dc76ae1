//! The prefill node; everything is in the library `node`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    node::run(node::Role::Prefill)
}
