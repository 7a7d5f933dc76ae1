#!/usr/bin/env bash
# Prints the labels of an image, one KEY=VALUE in a line. The argument is the image's title, such as baton.
#
#   BATON_SOURCE        address of the repository, default the remote origin if it is an address for others
#   BATON_URL           page about the image, default the address of the repository
#   SOURCE_DATE_EPOCH   time of creation in seconds since 1970, default the time of the commit
set -euo pipefail
cd "$(dirname "$0")/../.."
title=$1
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)

time=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
[[ $time =~ ^[0-9]{1,11}$ ]] || {
    echo "invalid SOURCE_DATE_EPOCH: \"$time\"; expected seconds since 1970" >&2
    exit 1
}

# Prints the web address of the remote origin, without user and password. Prints nothing if origin is a local folder.
origin() {
    local remote port=
    remote=$(git config --get remote.origin.url || true)
    if [[ $remote =~ ^(https|ssh)://([^/@]*@)?([^/:@]+)(:[0-9]+)?/([^@?#]+)$ ]]; then
        # The port of SSH is not that of the web page.
        [[ ${BASH_REMATCH[1]} == ssh ]] || port=${BASH_REMATCH[4]}
        remote=https://${BASH_REMATCH[3]}$port/${BASH_REMATCH[5]}
    elif [[ $remote =~ ^[^/@:]+@([^/:]+):/*([^@?#]+)$ ]]; then
        remote=https://${BASH_REMATCH[1]}/${BASH_REMATCH[2]}
    else
        return 0
    fi
    echo "${remote%.git}"
}

source=${BATON_SOURCE:-$(origin)}
url=${BATON_URL:-$source}
for name in source url; do
    [[ -z ${!name} || ${!name} =~ ^https?://[^[:space:]@]+$ ]] || {
        value=${!name}
        # No password in the output.
        [[ $value != *://*@* ]] || value="${value%%://*}://…@${value##*@}"
        echo "invalid BATON_${name^^}: \"$value\"; expected https://HOST/PATH without a user" >&2
        exit 1
    }
done
[[ -n $source ]] || echo "no label source: the remote origin is missing or no web or ssh address; expected BATON_SOURCE=https://HOST/PATH" >&2

label() { echo "org.opencontainers.image.$1=$2"; }
label title "$title"
label version "$version"
# --exclude: the commit, also where a tag names it.
label revision "$(git describe --always --abbrev=40 --exclude '*' --dirty)"
label created "$(date --utc --date="@$time" +%Y-%m-%dT%H:%M:%SZ)"
label licenses Apache-2.0
[[ -z $source ]] || label source "$source"
[[ -z $url ]] || label url "$url"
