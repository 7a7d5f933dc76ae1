#!/usr/bin/env python3
"""Installs the Helm chart in the test cluster, upgrades, scales and deletes pods under load, and prints measured values and targets.

Runs in the cluster: deploy/k8s/cluster.py deploy/k8s/test.py
"""

import contextlib
import datetime
import json
import os
import pathlib
import re
import secrets
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request

from load import Load, golden, stream

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
CHART = ROOT / "helm/baton"
MODEL = ROOT / "models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"
NAMESPACE, RELEASE, NAME = "default", "one", "smollm2-135m"
ROUTER = f"{RELEASE}-baton-router.{NAMESPACE}.svc.cluster.local:8000"
ROLLOUT_SECONDS = 180
SETTLE_SECONDS = 3
CRDS = TARGET / "k8s/crds"
VALUES = sorted((ROOT / "integration-tests/tests/chart/values").glob("*.yaml"))
COLLECTOR = "http://10.244.0.1:4317"
GPUS = "nvidia.com/gpu"


class Api:
    """A client of the Kubernetes API, faster than running kubectl for each call."""

    def __init__(self):
        config = json.loads(pathlib.Path(os.environ["KUBECONFIG"]).read_text())
        cluster = config["clusters"][0]["cluster"]
        self.server, self.token = cluster["server"], config["users"][0]["user"]["token"]
        self.context = ssl.create_default_context(cafile=cluster["certificate-authority"])

    def request(self, method, path, body=None):
        request = urllib.request.Request(self.server + path, method=method, headers={
            "Authorization": f"Bearer {self.token}", "Content-Type": "application/json"})
        data = json.dumps(body).encode() if body else None
        with urllib.request.urlopen(request, data, timeout=30, context=self.context) as response:
            return json.load(response)

    def pods(self, component=None):
        """Returns the release's pods that are not being deleted."""
        selector = f"app.kubernetes.io/instance={RELEASE}"
        if component:
            selector += f",app.kubernetes.io/component={component}"
        pods = self.request("GET", f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector={selector}")["items"]
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def evict(self, pod):
        """Evicts a pod, once its PodDisruptionBudget allows it."""
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": NAMESPACE}}
        wait(f"the eviction of {pod}", lambda: self.try_evict(pod, body))

    def try_evict(self, pod, body):
        try:
            self.request("POST", f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/eviction", body)
        except urllib.error.HTTPError as error:
            if error.code == 429:
                return False
            raise
        return True


def condition(pod, kind):
    """Returns when the pod's condition became true, or None."""
    for entry in pod["status"].get("conditions", []):
        if entry["type"] == kind and entry["status"] == "True":
            return parse_time(entry["lastTransitionTime"])
    return None


def parse_time(text):
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def wait(what, check):
    """Repeats a check until it returns something true, and returns it."""
    deadline = time.monotonic() + ROLLOUT_SECONDS
    while not (result := check()):
        if time.monotonic() > deadline:
            raise SystemExit(f"no {what} within {ROLLOUT_SECONDS} s")
        time.sleep(0.1)
    return result


def run(*command, input=None):
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, input=input)
    if result.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}:\n{result.stdout}{result.stderr}")
    return result.stdout


def helm(verb, values, *flags):
    return run("helm", verb, RELEASE, CHART, "-f", values, f"--timeout={ROLLOUT_SECONDS}s", *flags)


def settled():
    """Waits until every Deployment of the release has rolled out and old pods have gone."""
    for deployment in run("kubectl", "get", "deployments", "-o", "name").split():
        run("kubectl", "rollout", "status", deployment, f"--timeout={ROLLOUT_SECONDS}s")


def write_values(name, router, prefill, decode):
    """Writes a values file: the chart's defaults with these replicas, and the model of this machine."""
    model = {"name": NAME, "source": MODEL.name, "volume": {"hostPath": {"path": str(MODEL.parent)}},
             # The golden outputs are from f32.
             "dtype": "f32", "prefill": {"replicas": prefill}, "decode": {"replicas": decode}}
    path = pathlib.Path("/run") / f"{name}.json"
    path.write_text(json.dumps({"models": [model], "router": {"replicas": router},
                                "telemetry": {"config": {"otlp": COLLECTOR}}}))
    return path


def answered():
    """Returns whether a request was answered. kube-proxy learns of a ready router up to a second after Helm."""
    try:
        stream(Load(ROUTER, NAME).connect(), NAME, *golden()[0])
    except ConnectionError:
        return False
    return True


class Table:
    """Table of measured values and their targets. Times depend on the machine, so only other values fail the test."""

    def __init__(self):
        self.rows, self.failed = [], 0

    def seconds(self, what, value, target=None):
        self.row(what, target or "-", f"{value:.1f}", not target or value <= target)

    def require(self, what, target, value, met=None):
        met = value == target if met is None else met
        self.row(what, target, value, met)
        self.failed += not met

    def row(self, what, target, value, met):
        self.rows.append((what, target, value, "yes" if met else "no"))
        print(f"{what}: {value} (target {target})", flush=True)

    @contextlib.contextmanager
    def under_load(self, what, gap=None, settle=SETTLE_SECONDS):
        """Measures the load while the block runs, and some seconds before and after."""
        with Load(ROUTER, NAME) as load:
            time.sleep(SETTLE_SECONDS)
            yield
            time.sleep(settle)
        for failure in sorted(set(load.failures))[:5]:
            print(f"  {failure}", flush=True)
        self.require(f"{what}: failed of {load.finished + len(load.failures)} requests", 0, len(load.failures))
        self.seconds(f"{what}: longest gap between tokens, s", load.gap, gap)
        self.seconds(f"{what}: longest time to first token, s", load.first)

    def print(self):
        print("\n| what | target | reached | met |\n| --- | --- | --- | --- |")
        for row in self.rows:
            print(f"| {' | '.join(map(str, row))} |")
        print(f"\n{len(self.rows) - self.failed} passed, {self.failed} failed")


def dry_run(table, api):
    """Lets the API server validate every object of the chart, those of custom resources included."""
    run("kubectl", "apply", "--server-side", "-f", CRDS)
    run("kubectl", "wait", "--for=condition=Established", "crd", "--all")
    for values in VALUES:
        rendered = run("helm", "template", RELEASE, CHART, "-f", values, "--dry-run=server")
        accepted = run("kubectl", "apply", "--dry-run=server", "-f", "-", input=rendered).splitlines()
        table.require(f"{values.name}: objects that the API server accepts", rendered.count("\nkind: "), len(accepted))


def place_on_gpus(table, api):
    """Installs the values for GPUs, adds GPU nodes that exist only in the API, and checks where the scheduler places the pods."""
    for index in range(2):
        resources = {"cpu": "64", "memory": "512Gi", "pods": "110", GPUS: "8"}
        api.request("POST", "/api/v1/nodes", {
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": f"gpu-{index}"},
            "spec": {"taints": [{"key": GPUS, "effect": "NoSchedule"}]},
            "status": {"capacity": resources, "allocatable": resources,
                       "conditions": [{"type": "Ready", "status": "True", "reason": "Test"}]}})
    run("kubectl", "create", "namespace", "gpu")
    run("helm", "install", "gpu", CHART, "--namespace", "gpu", "-f", CHART / "values-gpu.yaml")

    def placed():
        pods = api.request("GET", "/api/v1/namespaces/gpu/pods")["items"]
        pods = [pod for pod in pods if GPUS in pod["spec"]["containers"][0]["resources"].get("limits", {})]
        return len(pods) == 2 and all("nodeName" in pod["spec"] for pod in pods) and pods

    nodes = [pod["spec"]["nodeName"] for pod in wait("node for the pods with GPUs", placed)]
    table.require("pods with GPUs that are placed on nodes with GPUs", 2, sum(node.startswith("gpu-") for node in nodes))
    run("kubectl", "delete", "namespace", "gpu", "--wait=false")
    run("kubectl", "delete", "node", "gpu-0", "gpu-1")


def install(table, api, values):
    start = time.monotonic()
    helm("install", values, "--wait")
    installed = time.monotonic() - start
    wait("answer", answered)
    seconds = time.monotonic() - start
    table.seconds("helm install --wait, s", installed)
    table.seconds("helm install --wait to first token, s", seconds, 30)
    # The API rounds both times to seconds. A router waits for its first decode node.
    for role in ("prefill", "decode", "router"):
        started = max(condition(pod, "Ready") - parse_time(container(pod)["state"]["running"]["startedAt"])
                      for pod in api.pods(role))
        table.seconds(f"{role}: container start to Ready, s", started, 3)


def container(pod):
    return pod["status"]["containerStatuses"][0]


def upgrade(table, api, values, what):
    """Upgrades to another image and back, under load."""
    tag = image_tag(api)
    run("ctr", "-n", "k8s.io", "images", "tag", "--force", f"docker.io/library/baton:{tag}", "docker.io/library/baton:next")
    with table.under_load(f"{what}, upgrade to another image and rollback", gap=2.5):
        helm("upgrade", values, "--set", "image.tag=next", "--wait")
        wait("pod of the old image gone", lambda: all(":next" in image(pod) for pod in serving(api)))
        run("helm", "rollback", RELEASE, "--wait", f"--timeout={ROLLOUT_SECONDS}s")
        wait("pod of the new image gone", lambda: all(":next" not in image(pod) for pod in serving(api)))


def serving(api):
    return [pod for role in ("router", "prefill", "decode") for pod in api.pods(role)]


def image(pod):
    return pod["spec"]["containers"][0]["image"]


def image_tag(api):
    return image(api.pods("router")[0]).rsplit(":", 1)[1]


def delete_decode(table, api):
    pod = api.pods("decode")[0]["metadata"]["name"]
    with table.under_load("decode pod deleted without grace"):
        run("kubectl", "delete", "pod", pod, "--force", "--grace-period=0")
        settled()


def delete_etcd(table, api):
    # Leases of 10 s are lost with etcd.
    with table.under_load("etcd pod deleted", settle=12):
        run("kubectl", "delete", "pod", api.pods("etcd")[0]["metadata"]["name"])
        settled()


def evict_all(table, api):
    with table.under_load("every pod evicted in turn"):
        for pod in api.pods():
            api.evict(pod["metadata"]["name"])
            settled()


def trace(table, api):
    """Sends one request with a trace id and looks for its spans in the collector."""
    trace_id = secrets.token_hex(16)
    stream(Load(ROUTER, NAME).connect(), NAME, *golden()[-1], headers={"traceparent": f"00-{trace_id}-{'1' * 16}-01"})

    def found():
        spans = []
        for line in (TARGET / "k8s/logs/traces.json").read_text().splitlines():
            for resource in json.loads(line)["resourceSpans"]:
                names = {entry["key"]: entry["value"].get("stringValue") for entry in resource["resource"]["attributes"]}
                spans += [(names["service.instance.id"], span["name"]) for scope in resource["scopeSpans"]
                          for span in scope["spans"] if span["traceId"] == trace_id]
        return len(spans) >= 8 and spans

    spans = wait("trace with eight spans in the collector", found)
    pods = {pod["metadata"]["name"] for pod in serving(api)}
    named = {pod for pod, _ in spans} & pods
    table.require("one request: spans in the collector", 8, len(spans), len(spans) >= 8)
    table.require("one request: pods that its spans name", 3, len(named))


def scale(table, api):
    """Scales decode nodes 1 → 3 → 1 and measures when a new node serves its first request after it is ready."""
    with table.under_load("decode nodes 1 → 3 → 1"):
        old = {pod["metadata"]["name"] for pod in api.pods("decode")}
        helm("upgrade", write_values("scaled", router=1, prefill=1, decode=3))
        ready, served = {}, {}

        def all_serve():
            for pod in api.pods("decode"):
                name = pod["metadata"]["name"]
                if name in old or name in served or not condition(pod, "Ready"):
                    continue
                ready.setdefault(name, time.monotonic())
                if steps(pod):
                    served[name] = time.monotonic()
            return len(served) == 2

        wait("request on both new decode nodes", all_serve)
        helm("upgrade", write_values("few", router=1, prefill=1, decode=1), "--wait")
        wait("end of two decode nodes", lambda: len(api.pods("decode")) == 1)
    seconds = max(served[name] - ready[name] for name in served)
    table.seconds("a new decode node's first request after Ready, s", seconds, 2)


def steps(pod):
    """Returns the tokens that a node's steps have processed."""
    with urllib.request.urlopen(f"http://{pod['status']['podIP']}:9090/metrics", timeout=5) as response:
        values = re.findall(r"^baton_step_tokens_total\S* (\S+)$", response.read().decode(), re.M)
    return sum(map(float, values))


def main():
    table, api = Table(), Api()
    few = write_values("few", router=1, prefill=1, decode=1)
    many = write_values("many", router=2, prefill=2, decode=2)
    try:
        dry_run(table, api)
        place_on_gpus(table, api)
        install(table, api, few)
        run("helm", "test", RELEASE, "--logs")
        trace(table, api)
        upgrade(table, api, few, "1P1D")
        scale(table, api)
        helm("upgrade", many, "--wait")
        upgrade(table, api, many, "2P2D")
        delete_decode(table, api)
        delete_etcd(table, api)
        evict_all(table, api)
    finally:
        table.print()
    return table.failed > 0


if __name__ == "__main__":
    sys.exit(main())
