#!/usr/bin/env bash
# Installs C and C++ compilers, Python, pip and the programs named as arguments with apt, unless present. PROGRAM=PACKAGE
# names a package that is not named after its program.
set -euo pipefail

wanted=()
command -v c++ >/dev/null || wanted+=(g++)
command -v cc >/dev/null || wanted+=(gcc)
command -v python3 >/dev/null || wanted+=(python3)
python3 -m pip --version >/dev/null 2>&1 || wanted+=(python3-pip)
for program in "$@"; do
    command -v "${program%%=*}" >/dev/null || wanted+=("${program#*=}")
done
[ ${#wanted[@]} -eq 0 ] && exit 0

sudo=
[ "$(id -u)" -eq 0 ] || sudo=sudo
if ! command -v apt-get >/dev/null; then
    echo "missing: ${wanted[*]}; install them with your package manager" >&2
    exit 1
fi
$sudo apt-get update -qq
$sudo apt-get install -y -qq "${wanted[@]}"
