"""Runs deploy/k8s/existing.py with a kubectl that records its calls, because no cluster of kind or k3s runs here: checks of the
arguments and the cluster, the calls in their order, the images, and the environment of the test.

Arguments: folder of the tools.
"""

import importlib.util
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tarfile
import tempfile

K8S = pathlib.Path(__file__).resolve().parents[2] / "deploy/k8s"
TOOLS = pathlib.Path(sys.argv[1])
# A host that refuses the kubelet's port is reachable.
ADDRESS = "127.0.0.1"

KUBECTL = """#!/usr/bin/env -S python3 -S
import json, os, pathlib, sys
arguments = sys.argv[1:]
state = json.loads(pathlib.Path(os.environ["FAKE_STATE"]).read_text())
given = sys.stdin.read() if "--filename=-" in arguments else ""
with open(os.environ["FAKE_CALLS"], "a") as calls:
    calls.write(json.dumps(["kubectl", *arguments, *([given] if given else [])]) + "\\n")
words = [word for word in arguments if not word.startswith("--")]
if state.get("error"):
    sys.exit(state["error"])
if words[:1] == ["version"]:
    print(json.dumps({"serverVersion": {"major": "1", "minor": state.get("minor", "33+")}}))
elif words[:2] == ["get", "namespace"]:
    print(state.get("namespace", ""), end="")
elif words[:2] == ["get", "nodes"]:
    print(json.dumps({"items": state["nodes"]}))
elif words[:2] == ["get", "service"]:
    print(json.dumps({"spec": {"ports": [{"nodePort": 30000 + len(words[2])}]}}))
elif words[:2] == ["config", "view"]:
    print("the configuration")
"""
RECORDER = """#!/usr/bin/env -S python3 -S
import json, os, pathlib, sys, tarfile
index = json.load(tarfile.open(sys.argv[-1]).extractfile("index.json"))
annotations = index["manifests"][0]["annotations"]
name = annotations["io.containerd.image.name"]
assert name == annotations["org.opencontainers.image.ref.name"], annotations
with open(os.environ["FAKE_CALLS"], "a") as calls:
    calls.write(json.dumps(["load", *sys.argv[1:-1], name]) + "\\n")
sys.exit(1 if os.environ.get("FAKE_LOAD_FAILS") else 0)
"""
COMMAND = """import json, os, signal, sys, time
names = ("BATON_K8S_NAMESPACE", "BATON_K8S_ROUTERS")
with open(os.environ["FAKE_CALLS"], "a") as calls:
    calls.write(json.dumps(["test", open(os.environ["KUBECONFIG"]).read(), *map(os.environ.get, names)]) + "\\n")
if os.environ.get("FAKE_SIGNAL"):
    os.kill(os.getppid(), getattr(signal, os.environ["FAKE_SIGNAL"]))
    time.sleep(1)
sys.exit(7)
"""


def node(**changes):
    """Returns a node that can run Baton, with some fields changed."""
    fields = {"ready": "True", "architecture": "amd64", "unschedulable": False, "address": ADDRESS} | changes
    return {"spec": {"unschedulable": fields["unschedulable"]},
            "status": {"nodeInfo": {"operatingSystem": "linux", "architecture": fields["architecture"]},
                       "conditions": [{"type": "Ready", "status": fields["ready"]}],
                       "addresses": [{"type": "Hostname", "address": "a"}, {"type": "InternalIP", "address": fields["address"]}]}}


def write_archive(path, **annotations):
    """Writes an archive with the parts of an OCI image that existing.py reads."""
    names = {"name": "org.opencontainers.image.ref.name", "full": "io.containerd.image.name"}
    index = {"manifests": [{"annotations": {names[key]: value for key, value in annotations.items()}}]}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for member, content in (("blobs/sha256/1", b"layer"), ("index.json", json.dumps(index).encode())):
            entry = tarfile.TarInfo(member)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


class Bench:
    """A folder with the fake programs, and the calls that they record."""

    def __init__(self, folder):
        self.folder = folder
        self.calls_path = folder / "calls"
        programs = folder / "bin"
        programs.mkdir()
        for name, text in (("kubectl", KUBECTL), ("helm", KUBECTL), ("recorder", RECORDER)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        (folder / "kubeconfig").write_text("")
        # As docker buildx writes it.
        write_archive(folder / "target/image/cpu.tar", name="0.1.0", full="docker.io/library/baton:0.1.0")
        write_archive(folder / "target/image/etcd.tar", name="localhost/baton-etcd:0.1.0")
        self.environment = {
            **os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "KUBECONFIG": str(folder / "kubeconfig"),
            "BATON_K8S_LOAD": "recorder image 'of a kind'", "CARGO_TARGET_DIR": str(folder / "target"),
            "FAKE_CALLS": str(self.calls_path), "FAKE_STATE": str(folder / "state")}

    def run(self, *arguments, state=None, **environment):
        """Runs existing.py. A variable that is None is not set."""
        self.calls_path.write_text("")
        (self.folder / "state").write_text(json.dumps({"nodes": [node()]} | (state or {})))
        merged = {name: value for name, value in (self.environment | environment).items() if value is not None}
        return subprocess.run([sys.executable, "-S", K8S / "existing.py", *map(str, arguments)], env=merged, capture_output=True, text=True)

    def calls(self):
        return [json.loads(line) for line in self.calls_path.read_text().splitlines()]


def refuses(bench, message, state=None, **environment):
    result = bench.run("--check", state=state, **environment)
    assert result.returncode == 1, result
    [line] = result.stderr.splitlines()
    assert line.startswith("cannot test in an existing cluster: ") and message in line, (message, line)


def invalid_arguments_and_unfit_clusters_are_refused_in_one_line(bench):
    refuses(bench, "missing KUBECONFIG", KUBECONFIG=None)
    refuses(bench, "cannot read /absent of KUBECONFIG", KUBECONFIG=f"{bench.folder}/kubeconfig:/absent")
    refuses(bench, 'missing BATON_K8S_LOAD, because KUBECONFIG names an existing cluster; expected', BATON_K8S_LOAD=None)
    refuses(bench, "missing BATON_K8S_LOAD", BATON_K8S_LOAD=" ")
    refuses(bench, "invalid BATON_K8S_LOAD: No closing quotation", BATON_K8S_LOAD="kind 'load")
    refuses(bench, "cannot find the program absent-program", BATON_K8S_LOAD="absent-program load")
    assert bench.calls() == [], "invalid arguments must not reach the cluster"
    refuses(bench, "connection refused by the server", state={"error": "connection refused\nby the server"})
    refuses(bench, "cannot use Kubernetes 1.28; expected 1.29 or newer", state={"minor": "28"})
    refuses(bench, "the namespace baton-test exists", state={"namespace": "namespace/baton-test"})
    unfit = [node(ready="False"), node(architecture="arm64"), node(unschedulable=True)]
    refuses(bench, "no node of the cluster is ready, schedulable and linux/amd64", state={"nodes": unfit})
    # TCP reaches no multicast address.
    refuses(bench, "cannot reach a node of the cluster from this machine: 224.0.0.1", state={"nodes": [node(address="224.0.0.1")]})
    passed = bench.run("--check", state={"nodes": [*unfit, node()]})
    assert passed.returncode == 0, passed
    verbs = {call[1] for call in bench.calls()}
    assert verbs == {"version", "get"}, f"a check must change nothing: {verbs}"


def images_are_loaded_and_the_namespace_is_deleted(bench):
    command = bench.folder / "command.py"
    command.write_text(COMMAND)
    result = bench.run(sys.executable, "-S", command)
    # The status of the command.
    assert result.returncode == 7, result
    calls = bench.calls()
    loaded = [call for call in calls if call[0] == "load"]
    assert loaded == [
        ["load", "image", "of a kind", "docker.io/library/baton:0.1.0"],
        ["load", "image", "of a kind", "docker.io/library/baton:next"],
        ["load", "image", "of a kind", "localhost/baton-etcd:0.1.0"],
    ], loaded
    [(configuration, namespace, routers)] = [call[1:] for call in calls if call[0] == "test"]
    assert (configuration, namespace) == ("the configuration\n", "baton-test")
    assert json.loads(routers) == {"baton": f"{ADDRESS}:30010", "bad": f"{ADDRESS}:30008"}, routers
    changes = [call[1:3] for call in calls if call[0] == "kubectl" and call[1] in ("create", "apply", "delete")]
    assert changes == [["create", "namespace"], ["apply", "--filename=-"], ["apply", "--filename=-"], ["delete", "namespace"]], changes
    service = json.loads(next(call for call in calls if call[1] == "apply")[-1])
    assert service["spec"]["type"] == "NodePort"
    assert service["spec"]["selector"] == {"app.kubernetes.io/instance": "baton", "app.kubernetes.io/component": "router"}
    assert calls[-1][1:3] == ["delete", "namespace"], calls[-1]

    for number in ("SIGTERM", "SIGHUP"):
        interrupted = bench.run(sys.executable, "-S", command, FAKE_SIGNAL=number)
        assert interrupted.returncode == 128 + getattr(signal, number), interrupted
        assert bench.calls()[-1][1:3] == ["delete", "namespace"], bench.calls()[-1]

    failed = bench.run(sys.executable, "-S", command, FAKE_LOAD_FAILS="1")
    assert failed.returncode == 1 and "cannot load docker.io/library/baton:0.1.0: recorder image" in failed.stderr, failed
    assert not any(call[1] in ("create", "delete") for call in bench.calls())
    (bench.folder / "target/image/etcd.tar").unlink()
    failed = bench.run(sys.executable, "-S", command)
    assert failed.returncode == 1 and "etcd.tar; run make image image-etcd" in failed.stderr, failed


def test_leaves_out_what_needs_its_own_cluster(bench):
    """Loads test.py as existing.py starts it."""
    os.environ |= {"BATON_K8S_NAMESPACE": "baton-test", "BATON_K8S_ROUTERS": json.dumps({"baton": "10.0.0.1:1", "bad": "10.0.0.1:2"})}
    os.environ |= {"CARGO_TARGET_DIR": str(bench.folder / "target"), "PATH": bench.environment["PATH"]}
    sys.path += [str(K8S), str(TOOLS / "python")]
    specification = importlib.util.spec_from_file_location("k8s_test", K8S / "test.py")
    test = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(test)
    assert (test.ROUTER, test.BAD_ROUTER, test.NAMESPACE) == ("10.0.0.1:1", "10.0.0.1:2", "baton-test")
    values = json.loads(test.write_values("few", router=1, prefill=1, decode=1).read_text())
    assert set(values) == {"models", "router"}, values

    called = []
    drills = ("missing_resource_definition", "dry_run", "place_on_gpus", "install", "trace", "panels", "second_release", "bad_input",
              "upgrade", "scale", "delete_decode", "delete_etcd", "evict_all", "alerts")
    for drill in drills:
        setattr(test, drill, lambda *_, drill=drill: called.append(drill))
    test.run = test.helm = lambda *_: ""
    assert test.main() == 0
    assert called == ["install", "bad_input", "upgrade", "scale", "upgrade", "delete_decode", "delete_etcd", "evict_all"], called


def api_of_an_existing_cluster_goes_through_kubectl(bench):
    (bench.folder / "bin/kubectl").write_text("""#!/usr/bin/env -S python3 -S
import json, sys
if sys.argv[1] == "create":
    assert json.load(sys.stdin)["kind"] == "Eviction"
    sys.exit("Error from server (TooManyRequests): Cannot evict pod")
if not sys.argv[3].endswith("/pods/p:9090/proxy/metrics"):
    sys.exit(print(json.dumps({"path": sys.argv[3]})))
print('baton_step_tokens_total{kind="prefill"} 3', 'baton_step_tokens_total{kind="decode"} 4', sep=chr(10))
""")
    specification = importlib.util.spec_from_file_location("k8s_test", K8S / "test.py")
    test = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(test)
    api = test.KubectlApi()
    assert api.request("GET", "/api/v1/nodes") == {"path": "/api/v1/nodes"}
    assert test.steps(api, {"metadata": {"name": "p"}}) == 7
    assert api.try_evict("p", {"kind": "Eviction"}) is False


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(pathlib.Path(name))
        invalid_arguments_and_unfit_clusters_are_refused_in_one_line(bench)
        images_are_loaded_and_the_namespace_is_deleted(bench)
        test_leaves_out_what_needs_its_own_cluster(bench)
        api_of_an_existing_cluster_goes_through_kubectl(bench)
