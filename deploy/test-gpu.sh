#!/usr/bin/env bash
# The tests of the CUDA backend. Where there is cargo they are built first, into target/gpu: one program,
# and beside it the kernel library and the binaries that tests of whole clusters run. On a GPU machine
# without a toolchain that folder and this script do: what is there is run. Without a GPU the tests say
# what they skip; BATON_TEST_GPU=1 makes that a failure.
#
#   --memcheck, --racecheck   first of all: a short run under compute-sanitizer, which must find nothing
#
# Whatever else is said goes to the program, for example a part of a test's name.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
target=${CARGO_TARGET_DIR:-target}
place=$target/gpu
case $place in
    /*) found=$place ;;
    *) found=$root/$place ;;
esac
script=integration-tests/tests/gpu/transformers_reference.py

sanitize=
case ${1:-} in
    # Every operation by itself, then steps of whole models, eager and replayed, with two in flight.
    --memcheck)
        sanitize=memcheck
        shift
        [[ $# -gt 0 ]] || set -- --skip={gpu::fault,gpu::start,gpu::load,gpu::clusters,gpu::soak}
        ;;
    # Shared memory is looked at access by access: only the smallest.
    --racecheck)
        sanitize=racecheck
        shift
        [[ $# -gt 0 ]] || set -- gpu::rows::norms gpu::rows::silu gpu::sampling::nonsense gpu::attention::a_window
        ;;
esac
if [[ -n $sanitize ]] && ! command -v compute-sanitizer >/dev/null; then
    echo "compute-sanitizer is not on PATH; it comes with the CUDA toolkit" >&2
    exit 1
fi

if command -v "${CARGO:-cargo}" >/dev/null; then
    program=$("${CARGO:-cargo}" test --locked --workspace --test gpu --no-run --message-format=json |
        sed -n 's/.*"name":"gpu".*"executable":"\([^"]*\)".*/\1/p')
    mkdir -p "$place"
    strip -o "$place/gpu" "$program"
    cp "$script" "$place/"
    "${CARGO:-cargo}" build --locked --workspace --bins
    for binary in baton baton-bench baton-router baton-prefill-node baton-decode-node; do
        strip -o "$place/$binary" "$target/debug/$binary"
    done
    if [[ -e $target/kernels/libbaton_kernels.so ]]; then
        cp "$target/kernels/libbaton_kernels.so" "$place/"
    fi
fi
if [[ -e $place/libbaton_kernels.so ]]; then
    export BATON_TEST_KERNELS=${BATON_TEST_KERNELS:-$found/libbaton_kernels.so}
fi
if [[ -e $place/baton ]]; then
    export BATON_TEST_BINARIES=${BATON_TEST_BINARIES:-$found}
fi
# The program itself uses NCCL, and has threads when it could set these.
export NCCL_NVLS_ENABLE=0 CUDA_DEVICE_MAX_CONNECTIONS=16
if [[ -n $sanitize ]]; then
    export BATON_TEST_SHORT=1
    exec timeout 900 compute-sanitizer --tool "$sanitize" --error-exitcode 1 --launch-timeout 0 \
        "$place/gpu" --nocapture --test-threads=1 "$@"
fi
if [[ -z ${BATON_TEST_REFERENCE:-} ]]; then
    if python3 -c 'import torch, transformers; assert torch.cuda.is_available()' 2>/dev/null; then
        export BATON_TEST_REFERENCE=$place/reference
        python3 "$place/${script##*/}" "$BATON_TEST_REFERENCE"
    else
        echo "skipped: no comparison with transformers, for python3 has no torch with a GPU, or no transformers"
    fi
fi
exec "$place/gpu" --nocapture --test-threads=1 "$@"
