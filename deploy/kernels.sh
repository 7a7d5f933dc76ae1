#!/usr/bin/env bash
# Builds libbaton_kernels.so, the CUDA kernels. The script installs a pinned nvcc and FlashInfer's headers with pip into
# the build folder; it needs neither a CUDA toolkit nor root. It rebuilds only units that changed.
#
#   BATON_CUDA_ARCHS   architectures in rising order, default "90a"; for example "80 89 90a"
#   BATON_CUDA_JOBS    parallel compilers, default 1; the FA3 units take 3.6 GB each and always compile one at a time
set -euo pipefail
shopt -s nullglob
cd "$(dirname "$0")/.."
root=$PWD
archs=${BATON_CUDA_ARCHS:-90a}
jobs=${BATON_CUDA_JOBS:-1}
out=${CARGO_TARGET_DIR:-$root/target}/kernels
library=$out/libbaton_kernels.so

# Exact versions: FlashInfer's C++ interface changes between releases, and the output of a newer nvcc may need a
# newer driver.
flashinfer=0.6.12
tools="nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88
    nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85"
headers="nvidia-curand==10.4.0.35 flashinfer-python==$flashinfer"
# Only one unit uses NVTX, so NVTX is not part of the other units' keys.
ranges="nvidia-nvtx==13.0.85"

for arch in $archs; do
    [[ $arch =~ ^[0-9]+[af]?$ ]] || { echo "invalid BATON_CUDA_ARCHS: \"$archs\"; expected numbers such as 80 or 90a" >&2; exit 1; }
done
[[ $jobs =~ ^[1-9][0-9]*$ ]] || { echo "invalid BATON_CUDA_JOBS: \"$jobs\"; expected 1 or more" >&2; exit 1; }

key_of() { sha256sum | cut -c1-16; }
mapfile -t sources < <(find kernels/cuda -type f \( -name '*.cu' -o -name '*.cuh' -o -name '*.h' \) ! -path '*/tests/*' | sort)
own=$(cat deploy/kernels.sh | key_of)
key=$({ echo "$own $archs"; sha256sum "${sources[@]}"; } | key_of)
if [[ -e $library && $(cat "$out/key" 2>/dev/null) == "$key" ]]; then
    echo "$library is up to date"
    exit
fi

deploy/deps.sh
# One toolchain per set of pinned versions.
toolchain=$out/toolchain-$(echo "$tools $headers" | key_of)
if [[ ! -e $toolchain/complete ]]; then
    echo "fetching the compiler and FlashInfer $flashinfer (270 MB) to $toolchain"
    rm -rf "$toolchain"
    mkdir -p "$toolchain/wheels"
    python3 -m venv "$toolchain/env"
    # shellcheck disable=SC2086 # lists of words
    "$toolchain/env/bin/pip" install --quiet --disable-pip-version-check --no-deps $tools
    # shellcheck disable=SC2086
    "$toolchain/env/bin/pip" download --quiet --disable-pip-version-check --no-deps --dest "$toolchain/wheels" $headers
    cuda=$(echo "$toolchain"/env/lib/python3*/site-packages/nvidia/cu13)
    "$toolchain/env/bin/python" - "$toolchain" "$cuda" <<'PYTHON'
import pathlib, sys, zipfile
toolchain, cuda = map(pathlib.Path, sys.argv[1:])
wheel = lambda name: zipfile.ZipFile(next(toolchain.glob(f"wheels/{name}*.whl")))
# cuRAND: headers only, for the device code that FlashInfer includes.
with wheel("nvidia_curand") as curand:
    for name in curand.namelist():
        if name.startswith("nvidia/cu13/include/") and not name.endswith("/"):
            (cuda / "include" / pathlib.PurePath(name).name).write_bytes(curand.read(name))
with wheel("flashinfer_python") as flashinfer:
    wanted = ("include/", "cutlass/include/", "cutlass/tools/util/include/", "cccl/")
    for name in flashinfer.namelist():
        if name.startswith(tuple(f"flashinfer/data/{folder}" for folder in wanted)) or "/licenses/" in name:
            flashinfer.extract(name, toolchain)
# One FlashInfer header includes these two and uses no symbol of them.
for name in ("cublasLt.h", "cublas_v2.h"):
    (cuda / "include" / name).touch()
PYTHON
    rm -rf "$toolchain/wheels"
    touch "$toolchain/complete"
fi
cuda=$(echo "$toolchain"/env/lib/python3*/site-packages/nvidia/cu13)
data=$toolchain/flashinfer/data
nvtx=$out/nvtx-$(echo "$ranges" | key_of)
if [[ ! -e $nvtx/complete ]]; then
    rm -rf "$nvtx"
    "$toolchain/env/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$nvtx" "$ranges"
    touch "$nvtx/complete"
fi

flags=(-std=c++17 -O3 --expt-relaxed-constexpr -lineinfo -cudart static --threads 1
    -Xcompiler -fPIC,-fvisibility=hidden -Ikernels/cuda/include -Ikernels/cuda/src)
# FlashInfer needs its own CCCL, which is newer than the CCCL of the toolkit.
flash_flags=(-DNDEBUG -DFLASHINFER_ENABLE_BF16 -DFLASHINFER_ENABLE_F16 -DFLASHINFER_ENABLE_FP8_E4M3
    -DFLASHINFER_ENABLE_FP8_E5M2 -DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
    "-I$data/include" "-I$data/cccl/cub" "-I$data/cccl/libcudacxx/include" "-I$data/cccl/thrust"
    "-I$data/cutlass/include" "-I$data/cutlass/tools/util/include")
gencode=() has_hopper=
for arch in $archs; do
    gencode+=("-gencode=arch=compute_$arch,code=sm_$arch")
    [[ $arch == 90a ]] && has_hopper=-DBATON_HAS_HOPPER
done
names=$(for arch in $archs; do printf 'sm_%s ' "$arch"; done)

# Units: name, source, further flags. FA3 exists only for sm_90a.
units=()
unit() { units+=("$*"); }
unit abi src/abi.cu "-DBATON_ARCHES=\"${names% }\" -DBATON_FLASHINFER=\"$flashinfer\""
for name in rows quantize rope blocks step drafts probe; do unit $name src/$name.cu; done
unit attention src/attention.cu $has_hopper
# Without fused multiply-add the probabilities are bit-equal to the CPU's.
for name in sample sample_draw sample_choose; do unit $name src/$name.cu -fmad=false; done
unit tp_sample collective/tp_sample.cu -fmad=false
unit decode_attention attention/decode_attention.cu
unit delta delta/delta.cu
for name in skinny_gemm int4_gemm wide_gemm wide_fp8_gemm fp8_gemm low_rank; do unit $name gemm/$name.cu; done
for name in all_reduce gather; do unit $name collective/$name.cu; done
for name in digest weights; do unit $name digest/$name.cu; done
for name in route expert_gemm mxfp4_gemm; do unit $name experts/$name.cu; done
unit ranges trace/ranges.cu "-I$nvtx/nvidia/cu13/include"
for dim in 64 128 256; do
    unit flash_prefill_$dim src/flash_prefill.cu -DBATON_HEAD_DIM=$dim
    [[ -z $has_hopper ]] || unit flash_hopper_$dim src/flash_hopper.cu -DBATON_HEAD_DIM=$dim
done

# An object's name contains the hash of the unit's source, headers and flags.
objects=$out/objects
mkdir -p "$objects"
compile() {
    local name source further started=$SECONDS unit_gencode=("${gencode[@]}") unit_flags=("${flags[@]}")
    read -r name source further <<<"$1"
    # Baton's headers that the unit includes. FlashInfer's units compile slowly and include only a few.
    local own_headers=(kernels/cuda/include/*.h kernels/cuda/src/*.h)
    case $name in
        flash_hopper_*) unit_gencode=(-gencode=arch=compute_90a,code=sm_90a) ;&
        flash_*) unit_flags+=(-w "${flash_flags[@]}") ;;
        all_reduce | gather | tp_sample)
            own_headers+=(kernels/cuda/src/*.cuh kernels/cuda/collective/*.h kernels/cuda/collective/*.cuh)
            unit_flags+=(-Ikernels/cuda/collective) ;;
        abi)
            own_headers+=(kernels/cuda/src/*.cuh kernels/cuda/collective/*.h kernels/cuda/delta/*.h kernels/cuda/experts/*.h)
            unit_flags+=(-Ikernels/cuda/collective -Ikernels/cuda/delta -Ikernels/cuda/experts) ;;
        digest | weights)
            own_headers+=(kernels/cuda/src/*.cuh kernels/cuda/digest/*.h kernels/cuda/digest/*.cuh)
            unit_flags+=(-Ikernels/cuda/digest) ;;
        route | expert_gemm | mxfp4_gemm)
            own_headers+=(kernels/cuda/src/*.cuh kernels/cuda/experts/*.h kernels/cuda/experts/*.cuh kernels/cuda/gemm/hopper.h)
            unit_flags+=(-Ikernels/cuda/experts) ;;
        ranges) own_headers+=(kernels/cuda/trace/*.h) unit_flags+=(-Ikernels/cuda/trace) ;;
        delta) own_headers+=(kernels/cuda/src/*.cuh kernels/cuda/delta/*.h) ;;
        decode_attention) own_headers+=(kernels/cuda/src/*.cuh kernels/cuda/attention/*.cuh) ;;
        *_gemm | low_rank) own_headers+=(kernels/cuda/src/*.cuh kernels/cuda/gemm/*.h) ;;
        *) own_headers+=(kernels/cuda/src/*.cuh) ;;
    esac
    local more=()
    # The flags of unit `abi` contain quotes and spaces.
    [[ -z $further ]] || eval "more=($(sed 's/"\([^"]*\)"/\\"\1\\"/g; s/\(sm_[0-9a-f]*\) /\1\\ /g' <<<"$further"))"
    local object
    object=$objects/$name-$({
        echo "${toolchain##*-}" "${flags[@]}" "${unit_gencode[@]}" "${more[@]}"
        cat "${own_headers[@]}" "kernels/cuda/$source"
    } | key_of).o
    if [[ ! -e $object ]]; then
        local log=$objects/$name.log
        if ! nice -n 15 "$cuda/bin/nvcc" "${unit_flags[@]}" "${unit_gencode[@]}" "${more[@]}" -c -o "$object.part" \
            "kernels/cuda/$source" >"$log" 2>&1; then
            cat "$log" >&2
            return 1
        fi
        # With too few registers ptxas makes a kernel wait for each wgmma, and only reports it.
        if grep 'wgmma.mma_async instructions are serialized' "$log" >&2; then return 1; fi
        mv "$object.part" "$object"
        echo "  $name: $((SECONDS - started)) s" >&2
    fi
    echo "$object" >"$objects/$name.path"
}
echo "building $library for ${names% } (${#units[@]} units)"
rm -f "$objects"/*.path
running=0 failed=
finish_one() {
    wait -n || failed=1
    running=$((running - 1))
}
for item in "${units[@]}"; do
    [[ $item == flash_hopper_* ]] && continue
    if ((running >= jobs)); then finish_one; fi
    compile "$item" &
    running=$((running + 1))
done
while ((running > 0)); do finish_one; done
[[ -z $failed ]] || exit 1
for item in "${units[@]}"; do
    [[ $item != flash_hopper_* ]] || compile "$item"
done

mapfile -t paths < <(cat "$objects"/*.path)
((${#paths[@]} == ${#units[@]})) || { echo "cannot link $library: a unit did not compile" >&2; exit 1; }
# Link the C++ runtime statically. The CUDA driver is loaded at first use.
nice -n 15 "$cuda/bin/nvcc" -shared -cudart static -L"$cuda/lib" -Xlinker --no-undefined -Xlinker --gc-sections \
    -Xlinker --exclude-libs -Xlinker ALL -Xlinker -s -Xcompiler -static-libstdc++ -Xcompiler -static-libgcc \
    -o "$library.part" "${paths[@]}" -lpthread -ldl -lrt
mv "$library.part" "$library"
# Delete objects of earlier builds.
for object in "$objects"/*.o; do
    [[ " ${paths[*]} " == *" $object "* ]] || rm -f "$object"
done
echo "$key" >"$out/key"
echo "$library: $(stat -c %s "$library" | numfmt --to=si)B"
