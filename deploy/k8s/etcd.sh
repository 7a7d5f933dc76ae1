#!/usr/bin/env bash
# Builds the etcd of the Helm chart and of the test cluster's API server into target/k8s/bin. Go keeps what it has built.
set -euo pipefail
cd "$(dirname "$0")"
target=$(cd ../..; mkdir -p "${CARGO_TARGET_DIR:-target}/k8s"; cd "${CARGO_TARGET_DIR:-target}/k8s"; pwd)
command -v go >/dev/null || { echo "missing: go 1.26; install it from your package manager" >&2; exit 1; }
cd etcd
CGO_ENABLED=0 go build -trimpath -ldflags="-s -w" -o "$target/bin/etcd" go.etcd.io/etcd/server/v3
