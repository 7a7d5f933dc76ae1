#!/usr/bin/env bash
# Adds the libraries of RDMA adapters to the files of an image. NCCL opens libibverbs and libmlx5 when it starts, and
# libibverbs opens the driver of each adapter. Without them NCCL uses sockets.
#
#   deploy/image/rdma.sh ROOT
set -euo pipefail
root=$(realpath -m "$1")
cd "$(dirname "$0")/../.."
packages=$(mktemp -d)
trap 'rm -r "$packages"' EXIT
# libnl-3-200 and libnl-route-3-200 are the libraries that libibverbs links.
deploy/unpack.sh "$packages" libibverbs1 ibverbs-providers libnl-3-200 libnl-route-3-200
rm -r "$packages"/usr/share/lintian
find "$packages/usr/share/doc" -type f ! -name copyright -delete
mkdir -p "$root"
cp -r "$packages"/. "$root"

# The loader of the image looks in these folders. This machine provides only the C library.
folders=$(printf '%s:' "$root"/{,usr/}lib/*-linux-gnu)
for library in libibverbs.so.1 libmlx5.so.1 libibverbs/libmlx5-rdmav*.so; do
    path=$(echo "$root"/usr/lib/*-linux-gnu/$library)
    [[ -e $path ]] || { echo "cannot pack $library: the packages have no such file; expected rdma-core of Debian or Ubuntu" >&2; exit 1; }
    if missing=$(LD_LIBRARY_PATH=$folders ldd "$path" | grep '=>' | grep -vE "=> $root/|libc\.so"); then
        printf 'cannot pack %s, because libraries are missing:\n%s\n' "$library" "$missing" >&2
        exit 1
    fi
done
