#!/usr/bin/env bash
# The tests of the CUDA backend. Where there is cargo they are built first, into target/gpu: one program
# and the kernel library beside it. On a GPU machine without a toolchain that folder and this script do:
# what is there is run. Without a GPU the tests say what they skip; BATON_TEST_GPU=1 makes that a failure.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
target=${CARGO_TARGET_DIR:-target}
place=$target/gpu

if command -v "${CARGO:-cargo}" >/dev/null; then
    program=$("${CARGO:-cargo}" test --locked --workspace --test gpu --no-run --message-format=json |
        sed -n 's/.*"name":"gpu".*"executable":"\([^"]*\)".*/\1/p')
    mkdir -p "$place"
    strip -o "$place/gpu" "$program"
    if [[ -e $target/kernels/libbaton_kernels.so ]]; then
        cp "$target/kernels/libbaton_kernels.so" "$place/"
    fi
fi
if [[ -e $place/libbaton_kernels.so ]]; then
    export BATON_TEST_KERNELS=${BATON_TEST_KERNELS:-$root/$place/libbaton_kernels.so}
fi
exec "$place/gpu" --nocapture --test-threads=1 "$@"
