#!/usr/bin/env bash
# Packs an image as an OCI archive, with buildah, podman or docker. Packing runs no program of the image. Equal inputs give
# an equal digest: all times are the commit's, or SOURCE_DATE_EPOCH.
#
#   deploy/image.sh cpu     the four binaries, their libraries, CA certificates, licenses
#   deploy/image.sh gpu     also Baton's kernels, cuBLASLt, NCCL and the libraries of RDMA adapters
#   deploy/image.sh etcd    etcd, for the Helm chart's etcd.bundled (needs Go)
#
#   BATON_BIN     folder of the binaries, default target/release
#   BATON_IMAGE   name of the image, default baton:VERSION, baton:VERSION-gpu or baton-etcd:VERSION
#
# deploy/image/labels.sh lists the variables of the labels.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=${1:-cpu}
target=${CARGO_TARGET_DIR:-$PWD/target}
bin=${BATON_BIN:-$target/release}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
case $kind in
    cpu) name=baton:$version ;;
    gpu) name=baton:$version-gpu ;;
    etcd) name=baton-etcd:$version ;;
    *) echo "invalid image: \"$kind\"; expected cpu, gpu or etcd" >&2; exit 1 ;;
esac
name=${BATON_IMAGE:-$name}
title=${name##*/}
# Before the packing, so that an invalid variable costs no time.
labels=$(deploy/image/labels.sh "${title%%:*}")
out=$target/image
work=$out/$kind
root=$work/root
rm -rf "$work"
mkdir -p "$out"
umask 022

programs=("$bin"/baton "$bin"/baton-router "$bin"/baton-prefill-node "$bin"/baton-decode-node)
libraries=()
docs=$root/usr/share/doc
if [[ $kind == etcd ]]; then
    deploy/k8s/etcd.sh
    programs=("$target/k8s/bin/etcd")
fi
for program in "${programs[@]}"; do
    [[ -x $program ]] || { echo "cannot pack $program: no such program; run make build" >&2; exit 1; }
    install -D -m 755 "$program" "$root/usr/bin/${program##*/}"
done
if [[ $kind == etcd ]]; then
    install -D -m 644 "$(cd deploy/k8s/etcd && go list -m -f '{{.Dir}}' go.etcd.io/etcd/server/v3)/LICENSE" "$docs/etcd/LICENSE"
else
    install -D -m 644 LICENSE "$docs/baton/LICENSE"
    python3 deploy/licenses.py >"$docs/baton/THIRD-PARTY"
    python3 deploy/licenses.py spdx >"$docs/baton/sbom.spdx.json"
    install -D -m 644 /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
fi
if [[ $kind == gpu ]]; then
    kernels=$target/kernels/libbaton_kernels.so
    [[ -e $kernels ]] || { echo "cannot pack $kernels: no such file; run make kernels" >&2; exit 1; }
    install -D -m 644 "$kernels" "$root/usr/bin/libbaton_kernels.so"
    # The same CUDA release as deploy/kernels.sh, and the NCCL of docs/benchmarks.
    python3 -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target "$out/cuda" \
        'nvidia-cublas==13.0.2.14' 'nvidia-nccl-cu13==2.28.9'
    libraries+=("$out"/cuda/nvidia/cu13/lib/libcublasLt.so.13 "$out"/cuda/nvidia/nccl/lib/libnccl.so.2)
    for license in "$out"/cuda/nvidia_*.dist-info/{,licenses/}License.txt; do
        [[ ! -e $license ]] || install -D -m 644 "$license" "$docs/$(basename "${license%%.dist-info*}")/License.txt"
    done
    deploy/image/rdma.sh "$root"
fi
# The libraries that the packed files link, at the paths where the loader of this machine looks for them. A static program
# links none.
loaded=$(ldd "${programs[@]}" "${libraries[@]}" 2>/dev/null || true)
if missing=$(grep 'not found' <<<"$loaded"); then
    printf 'cannot pack %s, because libraries are missing:\n%s\n' "$name" "$missing" >&2
    exit 1
fi
linked=$(grep -oE '(=> )?/[^ :]+ \(' <<<"$loaded" | tr -d '=>( ' | sort -u || true)
for library in $linked; do
    install -D -m 755 "$library" "$root$library"
    package=$(dpkg -S "$library" "$(realpath "$library")" 2>/dev/null | head -1 | cut -d: -f1 || true)
    [[ -z $package ]] || install -D -m 644 "/usr/share/doc/$package/copyright" "$docs/$package/copyright"
done
for library in "${libraries[@]}"; do
    install -D -m 644 "$library" "$root/usr/lib/${library##*/}"
done
mkdir -p "$root/etc" "$root/tmp"
chmod 1777 "$root/tmp"
echo "baton:x:65532:65532::/tmp:/sbin/nologin" >"$root/etc/passwd"
echo "hosts: files dns" >"$root/etc/nsswitch.conf"

time=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
options=(--file deploy/image/Containerfile --tag "$name")
while read -r label; do options+=(--label "$label"); done <<<"$labels"
archive=$out/$kind.tar
rm -f "$archive"
# Docker without its plugin buildx cannot write OCI archives.
command -v buildah >/dev/null || command -v podman >/dev/null || docker buildx version >/dev/null 2>&1 || deploy/deps.sh buildah
if tool=$(command -v buildah || command -v podman); then
    # A separate store works without overlay mounts and does not change the user's store.
    store=(--storage-driver vfs --root "$work/store" --runroot "$work/run")
    "$tool" "${store[@]}" build --quiet --isolation chroot --timestamp "$time" "${options[@]}" "$work" >/dev/null
    "$tool" "${store[@]}" push --quiet "$name" "oci-archive:$archive:$name"
else
    SOURCE_DATE_EPOCH=$time docker buildx build --provenance=false "${options[@]}" \
        --output "type=oci,dest=$archive,rewrite-timestamp=true" "$work"
fi
digest=$(tar -xOf "$archive" index.json | grep -oE 'sha256:[0-9a-f]+' | head -1)
echo "$name: $(du -sb "$root" | cut -f1 | numfmt --to=si)B unpacked, $digest, in $archive"
rm -rf "$work"
