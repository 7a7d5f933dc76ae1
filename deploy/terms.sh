#!/usr/bin/env bash
# Finds words that have a standard term in the field, in sources and docs. `make lint` runs it.
set -euo pipefail
cd "$(dirname "$0")/.."

# A pattern (extended, Perl-compatible) and the term to use instead.
terms=(
    '\b[Mm]ultiprocessors?\b(?! \(SM)|SM (streaming multiprocessor)'
    '\b[Gg]reet(s|ed|ings)?\b|handshake, connect'
    '\b[Gg]uess(es|ed|ing)? (ahead|right)\b|speculative decoding, draft tokens, accepted'
    '\b[Rr]ecorded steps?\b|CUDA graph'
    '\b[Ss]ums? (of|over) (the )?(ranks|GPUs)\b|all-reduce'
    '\b[Cc]arriers?\b|transport'
    '(?<!["._])\b[Nn]otices?\b(?! 1")|control message'
    '\b([Pp]atience|PATIENCE)\b|time-out, deadline'
    '\b[Uu]nder way\b|in flight, running, in progress'
    '\bin work\b|in flight, running'
    '\b[Tt]ally\b|statistics, counters'
    '\b[Ff]orwards\b(?! to\b)|forward pass'
    '\b(lie|lies|lying) apart\b|strided, scattered'
    '\bbr(ing|ings|ought|inging) together\b|gather'
    '\bhanded round\b|broadcast'
    '\bwhich it cannot be\b|invalid'
    '\bis none of ours\b|unknown'
    '\bthat is none\b|invalid'
    '\bnobody has anything\b|empty'
    '\bsteps end again\b|recovered'
    '(?<!Hugging )\bface\b|interface, trait, seam'
    '\bdefects?\b|bug'
    '\b[Pp]aces?\b(?= of (reading|writing|prompts))|throughput'
    '^\s*//[/!] (Of|What|Who|Whoever|Where|Those|That of)\b|a verb, or the name of the thing'
)
status=0
for entry in "${terms[@]}"; do
    pattern=${entry%|*} term=${entry##*|}
    if git grep -nIP "$pattern" -- '*.rs' '*.cu' '*.cuh' '*.h' '*.py' '*.sh' '*.proto' '*.toml' '*.md' \
        ':!deploy/terms.sh' ':!integration-tests/tests/fuzz/corpus'; then
        echo "  instead: $term" >&2
        status=1
    fi
done
# Comments are as wide as code, which rustfmt keeps within 100 columns.
if git grep -nE '^\s*//.{99}' -- '*.rs' | grep -P ':\d+:.{101}'; then
    echo "  instead: comment lines of at most 100 columns" >&2
    status=1
fi
exit $status
