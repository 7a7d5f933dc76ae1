#!/usr/bin/env python3
"""Runs a command against the existing Kubernetes cluster of KUBECONFIG, such as one of kind or k3s.

    existing.py --check          only check the arguments and the cluster
    existing.py COMMAND...

The command gets a namespace of its own, the images that `make image` packed, and an address for the routers of each release.
Afterwards the namespace is deleted. Nothing else of the cluster changes, but its nodes keep the images.

Variables:
    KUBECONFIG       the cluster and user of its current context
    BATON_K8S_LOAD   your command that loads an image archive into every node; it gets the path of the archive as last argument:
                     "kind load image-archive" or "sudo k3s ctr images import"
"""

import contextlib
import ipaddress
import json
import os
import pathlib
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", HERE.parent.parent / "target")).resolve()
NAMESPACE = "baton-test"
# The releases that the test sends requests to, and the port of their routers.
RELEASES = ("baton", "bad")
HTTP_PORT = 8000
# As the chart's kubeVersion.
MINOR_MIN = 29
KUBELET_PORT = 10250
CONNECT_SECONDS = 5
API_SECONDS = 20
DELETE_SECONDS = 300
LOAD_SECONDS = 600


class Problem(Exception):
    """What the operator must change, in one line."""


def kubectl(*arguments, input=None, seconds=API_SECONDS):
    """Returns the output of kubectl."""
    command = ["kubectl", *map(str, arguments)]
    try:
        result = subprocess.run(command, input=input, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise Problem(f"no answer of the cluster within {seconds} s: {shlex.join(command)}") from None
    if result.returncode:
        raise Problem(f"{shlex.join(command)}: {' '.join(result.stderr.split())}")
    return result.stdout


def check_arguments(environment):
    """Returns the command that loads an archive."""
    files = environment.get("KUBECONFIG", "")
    if not files:
        raise Problem("missing KUBECONFIG; expected the configuration of kubectl for an existing cluster")
    for path in filter(None, files.split(os.pathsep)):
        if not os.access(path, os.R_OK):
            raise Problem(f"cannot read {path} of KUBECONFIG; expected a file, or unset KUBECONFIG for a cluster of this test's own")
    try:
        load = shlex.split(environment.get("BATON_K8S_LOAD", ""))
    except ValueError as error:
        raise Problem(f"invalid BATON_K8S_LOAD: {error}; expected a command") from None
    if not load:
        raise Problem('missing BATON_K8S_LOAD, because KUBECONFIG names an existing cluster; expected a command such as "kind load '
                      'image-archive", or unset KUBECONFIG for a cluster of this test\'s own')
    for program in (load[0], "kubectl", "helm"):
        if shutil.which(program) is None:
            raise Problem(f"cannot find the program {program}; expected it on the PATH")
    return load


def check_cluster():
    """Returns the address of a node that this machine reaches."""
    version = json.loads(kubectl("version", "--output=json", f"--request-timeout={API_SECONDS // 2}s"))["serverVersion"]
    minor = int("".join(filter(str.isdigit, version["minor"])))
    if version["major"] != "1" or minor < MINOR_MIN:
        raise Problem(f"cannot use Kubernetes {version['major']}.{minor}; expected 1.{MINOR_MIN} or newer")
    if kubectl("get", "namespace", NAMESPACE, "--ignore-not-found", "--output=name"):
        raise Problem(f"the namespace {NAMESPACE} exists; expected a cluster without it: kubectl delete namespace {NAMESPACE}")
    addresses = node_addresses(json.loads(kubectl("get", "nodes", "--output=json")))
    if not addresses:
        raise Problem("no node of the cluster is ready, schedulable and linux/amd64; expected one")
    for address in addresses:
        if is_reachable(address):
            return address
    raise Problem(f"cannot reach a node of the cluster from this machine: {', '.join(addresses)}; expected a route to its NodePorts")


def node_addresses(nodes):
    """Returns the internal addresses of the nodes that can run Baton."""
    found = []
    for node in nodes["items"]:
        info, conditions = node["status"]["nodeInfo"], node["status"]["conditions"]
        is_ready = any(it["type"] == "Ready" and it["status"] == "True" for it in conditions)
        if is_ready and not node["spec"].get("unschedulable") and (info["operatingSystem"], info["architecture"]) == ("linux", "amd64"):
            found += [it["address"] for it in node["status"]["addresses"] if it["type"] == "InternalIP"]
    return found


def is_reachable(address):
    """Returns whether the host answers, also if it refuses the connection."""
    try:
        socket.create_connection((address, KUBELET_PORT), CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def full_name(name):
    """Returns an image's name with its registry, as the kubelet looks it up: a name without one belongs to docker.io/library."""
    first, slash, _ = name.partition("/")
    if slash and (first == "localhost" or "." in first or ":" in first):
        return name
    return f"docker.io/{name}" if slash else f"docker.io/library/{name}"


def renamed(archive, output, tag=None):
    """Copies an OCI archive under the full name of its image, with another tag if given. Returns the name."""
    key, full = "org.opencontainers.image.ref.name", "io.containerd.image.name"
    with tarfile.open(archive) as source, tarfile.open(output, "w") as target:
        for member in source:
            content = source.extractfile(member)
            if member.name == "index.json":
                index = json.load(content)
                annotations = index["manifests"][0]["annotations"]
                # Docker writes the name into `full` and only the tag into `key`. containerd prefers `full`.
                name = full_name(annotations.get(full) or annotations[key])
                if tag:
                    name = f"{name.rpartition(':')[0]}:{tag}"
                annotations[key] = annotations[full] = name
                path = pathlib.Path(target.name).with_suffix(".index")
                path.write_text(json.dumps(index))
                member.size = path.stat().st_size
                content = path.open("rb")
            target.addfile(member, content)
    return name


def load_images(load, folder):
    """Loads the images, and the image of Baton again with the tag of an upgrade."""
    for kind, tag in (("cpu", None), ("cpu", "next"), ("etcd", None)):
        archive = TARGET / f"image/{kind}.tar"
        if not archive.exists():
            raise Problem(f"cannot find {archive}; run make image image-etcd")
        path = folder / f"{kind}-{tag or 'image'}.tar"
        name = renamed(archive, path, tag)
        command = [*load, str(path)]
        try:
            if subprocess.run(command, timeout=LOAD_SECONDS).returncode:
                raise Problem(f"cannot load {name}: {shlex.join(command)} failed")
        except subprocess.TimeoutExpired:
            raise Problem(f"cannot load {name} within {LOAD_SECONDS} s: {shlex.join(command)}") from None
        print(f"loaded {name}", flush=True)


def services(release):
    """Returns a NodePort Service for the routers of a release."""
    labels = {"app.kubernetes.io/instance": release, "app.kubernetes.io/component": "router"}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": f"test-{release}"},
            "spec": {"type": "NodePort", "selector": labels, "ports": [{"port": HTTP_PORT, "targetPort": "http"}]}}


def own_configuration(folder):
    """Writes a configuration with only the current context, in the test's namespace. Returns its path."""
    path = folder / "kubeconfig"
    path.touch(mode=0o600)
    path.write_text(kubectl("config", "view", "--raw", "--flatten", "--minify"))
    kubectl("--kubeconfig", path, "config", "set-context", "--current", f"--namespace={NAMESPACE}")
    return path


def run(command, load):
    """Runs the command. Returns its exit status."""
    with tempfile.TemporaryDirectory(prefix="baton-k8s-") as name, contextlib.ExitStack() as stack:
        folder = pathlib.Path(name)
        # From here on the operator may change the current context.
        os.environ["KUBECONFIG"] = str(own_configuration(folder))
        address = check_cluster()
        load_images(load, folder)
        # Before the namespace is created, because that may be interrupted. It did not exist before.
        stack.callback(kubectl, "delete", "namespace", NAMESPACE, "--ignore-not-found", f"--timeout={DELETE_SECONDS}s",
                       seconds=DELETE_SECONDS + API_SECONDS)
        kubectl("create", "namespace", NAMESPACE)
        host = f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
        routers = {}
        for release in RELEASES:
            kubectl("apply", "--filename=-", input=json.dumps(services(release)))
            service = json.loads(kubectl("get", "service", f"test-{release}", "--output=json"))
            routers[release] = f"{host}:{service['spec']['ports'][0]['nodePort']}"
        environment = {**os.environ, "BATON_K8S_NAMESPACE": NAMESPACE, "BATON_K8S_ROUTERS": json.dumps(routers)}
        return subprocess.run(command, env=environment).returncode


def main(arguments):
    # An interrupted test deletes its namespace.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        load = check_arguments(os.environ)
        if arguments != ["--check"]:
            return run(arguments, load)
        check_cluster()
        return 0
    except Problem as problem:
        raise SystemExit(f"cannot test in an existing cluster: {problem}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
