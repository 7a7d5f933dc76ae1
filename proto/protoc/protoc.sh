#!/bin/sh
# Stands in for protoc in build scripts: builds and runs the program beside it.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
# A separate target folder: the outer build waits for this script and holds the lock of its own target folder.
target=${CARGO_TARGET_DIR:-$here/../../target}
case ${OUT_DIR:-} in */build/*) target=${OUT_DIR%/build/*} ;; esac
# Flags and wrappers of the outer build are none of this program's business.
unset RUSTC_WORKSPACE_WRAPPER RUSTFLAGS CARGO_ENCODED_RUSTFLAGS CARGO_BUILD_TARGET
exec "${CARGO:-cargo}" run --quiet --locked --manifest-path "$here/Cargo.toml" \
    --target-dir "$target/protoc" -- "$@"
