//! Program of the prefill node. The library `node` has its code.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    node::run(node::Role::Prefill)
}
