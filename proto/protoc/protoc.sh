#!/bin/sh
# Replaces protoc in build scripts: builds and runs the Rust program of this folder.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
# A separate target folder: the outer build waits for this script and holds the lock of its own target folder.
target=${CARGO_TARGET_DIR:-$here/../../target}
case ${OUT_DIR:-} in */build/*) target=${OUT_DIR%/build/*} ;; esac
# The flags and wrappers of the outer build must not apply to this program.
unset RUSTC_WORKSPACE_WRAPPER RUSTFLAGS CARGO_ENCODED_RUSTFLAGS CARGO_BUILD_TARGET
exec "${CARGO:-cargo}" run --quiet --locked --manifest-path "$here/Cargo.toml" \
    --target-dir "$target/protoc" -- "$@"
