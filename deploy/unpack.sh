#!/usr/bin/env bash
# Downloads Debian packages and unpacks them into a folder, so that no service starts.
#
#   deploy/unpack.sh FOLDER PACKAGE...
set -euo pipefail
folder=$(realpath -m "$1")
shift
sudo=
[ "$(id -u)" -eq 0 ] || sudo=sudo
packages=$(mktemp -d)
trap 'rm -r "$packages"' EXIT
cd "$packages"
# The lists of a new machine may be missing or old.
apt-get download -qq "$@" 2>/dev/null || { $sudo apt-get update -qq && apt-get download -qq "$@"; }
for package in *.deb; do
    dpkg-deb -x "$package" "$folder"
done
