#!/usr/bin/env bash
# Runs the tests of the CUDA backend. With cargo on PATH the script first builds them into target/gpu: the
# test program, the kernel library and the programs that cluster tests start. A GPU machine without a
# toolchain needs only that folder and this script. A test that this machine cannot run is
# skipped; with BATON_TEST_GPU=N a test that needs at most N GPUs fails instead.
#
#   --memcheck, --racecheck   run a short selection under compute-sanitizer
#
# The golden-token tests need SmolLM2: the file in BATON_TEST_MODEL, else the file that `make model` fetches,
# else a *.gguf file in target/gpu. Other arguments go to the test program, for example a part of a test's
# name.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
target=${CARGO_TARGET_DIR:-target}
[[ $target == /* ]] || target=$root/$target
folder=$target/gpu
script=integration-tests/tests/gpu/transformers_reference.py

sanitize=
filters=()
case ${1:-} in
    --memcheck)
        sanitize=memcheck
        shift
        [[ $# -gt 0 ]] || set -- --skip={gpu::fault,gpu::start,gpu::load,gpu::clusters,gpu::soak}
        ;;
    # racecheck instruments every access to shared memory and is slow: run only the smallest tests.
    --racecheck)
        sanitize=racecheck
        shift
        [[ $# -gt 0 ]] ||
            filters=(gpu::rows::norms gpu::rows::activations gpu::sampling::non_finite gpu::attention::sliding_window)
        ;;
esac
if [[ -n $sanitize ]] && ! command -v compute-sanitizer >/dev/null; then
    echo "compute-sanitizer is not on PATH; it comes with the CUDA toolkit" >&2
    exit 1
fi

if command -v "${CARGO:-cargo}" >/dev/null; then
    program=$("${CARGO:-cargo}" test --locked --workspace --test gpu --no-run --message-format=json |
        sed -n 's/.*"name":"gpu".*"executable":"\([^"]*\)".*/\1/p')
    mkdir -p "$folder"
    strip -o "$folder/gpu" "$program"
    cp "$script" "$folder/"
    "${CARGO:-cargo}" build --locked --workspace --bins
    for binary in baton baton-bench baton-router baton-prefill-node baton-decode-node; do
        strip -o "$folder/$binary" "$target/debug/$binary"
    done
    if [[ -e $target/kernels/libbaton_kernels.so ]]; then
        cp "$target/kernels/libbaton_kernels.so" "$folder/"
    fi
fi
if [[ -e $folder/libbaton_kernels.so ]]; then
    export BATON_TEST_KERNELS=${BATON_TEST_KERNELS:-$folder/libbaton_kernels.so}
fi
if [[ -e $folder/baton ]]; then
    export BATON_TEST_BINARIES=${BATON_TEST_BINARIES:-$folder}
fi
# These must be set before the test program starts its first thread.
export NCCL_NVLS_ENABLE=0 CUDA_DEVICE_MAX_CONNECTIONS=16
if [[ -n $sanitize ]]; then
    export BATON_TEST_SHORT=1
    for filter in "${filters[@]:-}"; do
        timeout 900 compute-sanitizer --tool "$sanitize" --error-exitcode 1 --launch-timeout 0 \
            "$folder/gpu" --test-threads=1 "$@" ${filter:+"$filter"}
    done
    exit
fi

golden="not run: no SmolLM2; run make model or set BATON_TEST_MODEL"
for model in "${BATON_TEST_MODEL:-}" models/smollm2-135m/*.gguf "$folder"/*.gguf; do
    if [[ -e $model ]]; then
        export BATON_TEST_MODEL=$model
        golden="run with $model"
        break
    fi
done
reference="not run: python3 has no torch with CUDA, or no transformers"
if [[ -n ${BATON_TEST_REFERENCE:-} ]]; then
    reference="run with $BATON_TEST_REFERENCE"
elif python3 -c 'import torch, transformers; assert torch.cuda.is_available()' 2>/dev/null; then
    export BATON_TEST_REFERENCE=$folder/reference
    python3 "$folder/${script##*/}" "$BATON_TEST_REFERENCE"
    reference="run with torch on this GPU"
fi

status=0
"$folder/gpu" --test-threads=1 "$@" 2>&1 | tee "$folder/test.log" || status=1
echo "golden tokens: $golden"
echo "comparison with transformers: $reference"
grep "^skipped: " "$folder/test.log" | sort -u || true
# A test that restarts the test program prints a `test result` line too. Use the last line, which covers the whole run.
awk '/^test result:/ { passed = $4; failed = $6; skipped = $8; found = 1 }
    END { if (found) printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped; exit !found }' "$folder/test.log"
exit $status
