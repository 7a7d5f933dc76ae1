#!/usr/bin/env bash
# Packs the four binaries and, once they are built, the CUDA kernels as a tarball and as a Python wheel. The wheel holds no
# Python code: pip puts the binaries on the PATH. Its extra `cuda` adds NVIDIA's packages that nodes on GPUs load.
#
#   BATON_BIN   folder of the binaries, default target/release
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-$PWD/target}
bin=${BATON_BIN:-$target/release}
out=$target/dist
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
folder=baton-$version-x86_64-linux
umask 022
rm -rf "$out"
mkdir -p "$out/$folder"

for program in baton baton-router baton-prefill-node baton-decode-node; do
    [[ -x $bin/$program ]] || { echo "cannot pack $bin/$program: no such program; run make build" >&2; exit 1; }
    strip -o "$out/$folder/$program" "$bin/$program"
done
kernels=$target/kernels/libbaton_kernels.so
if [[ -e $kernels ]]; then
    strip -o "$out/$folder/${kernels##*/}" "$kernels"
else
    echo "packing without the CUDA kernels, because $kernels does not exist; make kernels builds it" >&2
fi
cp LICENSE "$out/$folder"
python3 deploy/licenses.py >"$out/$folder/THIRD-PARTY"
python3 deploy/licenses.py spdx >"$out/$folder/sbom.spdx.json"
# The wheel's tag contains the oldest glibc with which the binaries start.
glibc=$(objdump -T "$out/$folder"/baton* | grep -oE 'GLIBC_2\.[0-9]+' | sort -uV | tail -1 | cut -d. -f2)

time=$(git log -1 --format=%ct)
tar --sort=name --mtime="@$time" --owner=0 --group=0 --numeric-owner -C "$out" -c "$folder" | gzip -9n >"$out/$folder.tar.gz"
python3 - "$out" "$folder" "$version" "manylinux_2_${glibc}_x86_64" "$time" <<'PYTHON'
import base64, hashlib, pathlib, sys, time, zipfile

out, folder, version, platform, seconds = sys.argv[1:]
source = pathlib.Path(out, folder)
name = f"baton_llm-{version}"
tag = f"py3-none-{platform}"
files = {
    f"{name}.data/scripts/{path.name}": (path.read_bytes(), 0o100755)
    for path in sorted([*source.glob("baton*"), *source.glob("lib*.so")])
}
texts = {
    "METADATA": "Metadata-Version: 2.1\nName: baton-llm\n"
    f"Version: {version}\nSummary: Disaggregated LLM serving\nLicense: Apache-2.0\n"
    # The CUDA release of deploy/kernels.sh, and the NCCL of docs/benchmarks.
    "Provides-Extra: cuda\nRequires-Dist: nvidia-cublas==13.0.2.14; extra == 'cuda'\n"
    "Requires-Dist: nvidia-nccl-cu13==2.28.9; extra == 'cuda'\n",
    "WHEEL": f"Wheel-Version: 1.0\nGenerator: deploy/dist.sh\nRoot-Is-Purelib: false\nTag: {tag}\n",
    **{f"licenses/{path}": (source / path).read_text() for path in ("LICENSE", "THIRD-PARTY", "sbom.spdx.json")},
}
files |= {f"{name}.dist-info/{path}": (text.encode(), 0o100644) for path, text in texts.items()}
digest = lambda data: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
record = "".join(f"{path},sha256={digest(data)},{len(data)}\n" for path, (data, _) in files.items())
files[f"{name}.dist-info/RECORD"] = ((record + f"{name}.dist-info/RECORD,,\n").encode(), 0o100644)
with zipfile.ZipFile(f"{out}/{name}-{tag}.whl", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
    for path, (data, mode) in files.items():
        info = zipfile.ZipInfo(path, time.gmtime(int(seconds))[:6])
        info.external_attr = mode << 16
        info.compress_type = zipfile.ZIP_DEFLATED
        wheel.writestr(info, data)
PYTHON
rm -r "${out:?}/$folder"
ls -l "$out" | awk 'NR > 1 { print $9 ": " $5 " bytes" }'
