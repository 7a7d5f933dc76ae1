//! Program of the decode node. The library `node` has its code.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    node::run(node::Role::Decode)
}
