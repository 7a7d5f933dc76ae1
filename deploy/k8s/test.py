#!/usr/bin/env python3
"""Installs the Helm chart in the test cluster, upgrades, scales and deletes pods under load, and prints measured values and targets.
Exits with 1 if a value is not as required or a time exceeds three times its target.

Runs in the test's own cluster: deploy/k8s/cluster.py deploy/k8s/test.py
or without the checks that need parts of that cluster in an existing one: deploy/k8s/existing.py deploy/k8s/test.py
"""

import base64
import contextlib
import datetime
import http.client
import json
import os
import pathlib
import re
import secrets
import shlex
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

from load import Load, golden, stream

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
BIN = pathlib.Path(os.environ.get("BATON_BIN", TARGET / "release"))
sys.path += [str(TARGET / "chart/python"), str(ROOT / "integration-tests/tests")]

import dashboards  # noqa: E402

CHART = ROOT / "helm/baton"
MODEL = ROOT / "models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"
RELEASE, NAME = "baton", "smollm2-135m"
# existing.py sets both variables: the namespace, and host:port of the routers of each release.
NAMESPACE = os.environ.get("BATON_K8S_NAMESPACE", "default")
EXISTING = json.loads(os.environ.get("BATON_K8S_ROUTERS", "{}"))
ROUTER = EXISTING.get(RELEASE, f"{RELEASE}-router.{NAMESPACE}.svc.cluster.local:8000")
BAD_ROUTER = EXISTING.get("bad", f"bad-baton-router.{NAMESPACE}.svc.cluster.local:8000")
ROLLOUT_SECONDS = 180
SETTLE_SECONDS = 3
CRDS = TARGET / "k8s/crds"
OLDEST_HELM = TARGET / "chart/helm3"
VALUES = sorted((ROOT / "integration-tests/tests/chart/values").glob("*.yaml"))
COLLECTOR = "http://10.244.0.1:4317"
PROMETHEUS_OTLP = "127.0.0.1:9090"
PROMETHEUS = "127.0.0.1:9091"
PROMETHEUS_FOLDER = pathlib.Path("/run/prometheus")
# The own cluster has its own /run.
VALUES_FOLDER = TARGET / "k8s" if EXISTING else pathlib.Path("/run")
GPUS = "nvidia.com/gpu"
ROUTERS = f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/component=router"


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

    def metrics(self, pod):
        with urllib.request.urlopen(f"http://{pod['status']['podIP']}:9090/metrics", timeout=5) as response:
            return response.read().decode()


class KubectlApi(Api):
    """A client of the Kubernetes API of an existing cluster, whose users kubectl can authenticate in any way."""

    def __init__(self):
        pass

    def raw(self, verb, path, body=None):
        """Returns the text of an answer of the API."""
        files = ["-f", "-"] if body else []
        result = subprocess.run(["kubectl", verb, "--raw", path, *files], capture_output=True, text=True, timeout=60,
                                input=json.dumps(body) if body else None)
        if "TooManyRequests" in result.stderr:
            raise urllib.error.HTTPError(path, 429, result.stderr, None, None)
        if result.returncode:
            raise OSError(f"kubectl {verb} --raw {path}: {result.stderr.strip()}")
        return result.stdout

    def request(self, method, path, body=None):
        return json.loads(self.raw({"GET": "get", "POST": "create"}[method], path, body))

    def metrics(self, pod):
        return self.raw("get", f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}:9090/proxy/metrics")


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
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, input=input, cwd=ROOT,
                            timeout=4 * ROLLOUT_SECONDS)
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
    model = {"source": MODEL.name, "volume": {"hostPath": {"path": str(MODEL.parent)}},
             # The golden outputs are from f32.
             "dtype": "f32", "prefill": {"replicas": prefill}, "decode": {"replicas": decode}}
    values = {"models": {NAME: model}, "router": {"replicas": router}}
    if not EXISTING:
        values |= {"telemetry": {"config": {"otlp": COLLECTOR}},
                   "monitoring": {part: {"enabled": True} for part in ("podMonitor", "rules", "dashboards")}}
    VALUES_FOLDER.mkdir(parents=True, exist_ok=True)
    path = VALUES_FOLDER / f"{name}.json"
    path.write_text(json.dumps(values))
    return path


def answered(router=ROUTER):
    """Returns whether a request was answered. kube-proxy learns of a ready router up to a second after Helm."""
    try:
        stream(Load(router, NAME).connect(), NAME, *golden()[0])
    except ConnectionError:
        return False
    return True


class Table:
    """Table of measured values and their targets. Times depend on the machine, so a time fails the test only beyond three times its
    target, and counts as missed before. Every other value must be met."""

    def __init__(self):
        self.rows, self.missed, self.failed = [], 0, 0

    def seconds(self, what, value, target=None):
        self.row(what, target or "-", f"{value:.1f}", not target or value <= target)
        if target and value > 3 * target:
            self.failed += 1
        elif target and value > target:
            self.missed += 1

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
        passed = len(self.rows) - self.missed - self.failed
        print(f"\n{passed} passed, {self.missed} missed the target of a time, {self.failed} failed")


def dry_run(table, api):
    """Lets the API server validate every object of the chart, those of custom resources included."""
    run("kubectl", "apply", "--server-side", "-f", CRDS)
    run("kubectl", "wait", "--for=condition=Established", "crd", "--all")
    for values in VALUES:
        rendered = run("helm", "template", RELEASE, CHART, "-f", values, "--dry-run=server")
        accepted = run("kubectl", "apply", "--dry-run=server", "-f", "-", input=rendered).splitlines()
        table.require(f"{values.name}: objects that the API server accepts", rendered.count("\nkind: "), len(accepted))


def place_on_gpus(table, api):
    """Installs the values for GPUs, adds GPU nodes that kwok simulates, and checks where pods with GPUs run."""
    for index in range(2):
        resources = {"cpu": "64", "memory": "512Gi", "pods": "110", GPUS: "8"}
        api.request("POST", "/api/v1/nodes", {
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": f"gpu-{index}", "annotations": {"kwok.x-k8s.io/node": "fake"}},
            "spec": {"taints": [{"key": GPUS, "effect": "NoSchedule"}]},
            "status": {"capacity": resources, "allocatable": resources}})
    run("kubectl", "create", "namespace", "gpu")
    run("helm", "install", "gpu", CHART, "--namespace", "gpu", "-f", CHART / "values-gpu.yaml", "--set", "models.m.source=hf:a/b")

    def are_running():
        pods = api.request("GET", "/api/v1/namespaces/gpu/pods")["items"]
        pods = [pod for pod in pods if GPUS in pod["spec"]["containers"][0]["resources"].get("limits", {})]
        return len(pods) == 2 and all(condition(pod, "Ready") for pod in pods) and pods

    nodes = [pod["spec"]["nodeName"] for pod in wait("pods with GPUs that are ready", are_running)]
    table.require("pods with GPUs that run on nodes with GPUs", 2, sum(node.startswith("gpu-") for node in nodes))
    # Deleting these pods takes CPU time and would disturb the next measurement.
    run("kubectl", "delete", "namespace", "gpu", f"--timeout={ROLLOUT_SECONDS}s")
    run("kubectl", "delete", "node", "gpu-0", "gpu-1")


def readme_command(verb):
    """Returns Helm's command of the README's Kubernetes section."""
    [line] = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith(f"helm {verb} ")]
    return shlex.split(line, comments=True)


class ReadyTimes:
    """Records when each pod becomes ready. The API's own times are whole seconds."""

    def __init__(self, api):
        self.api, self.ready, self.done = api, {}, threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.done.set()
        # A call of the API takes at most 30 s.
        self.thread.join(timeout=60)
        if self.thread.is_alive():
            raise SystemExit("cannot stop the watch of ready pods: the API does not answer within 60 s")

    def watch(self):
        while not self.done.wait(0.05):
            # The API server may restart or refuse a call; the next call follows at once.
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                for pod in self.api.pods():
                    if condition(pod, "Ready"):
                        self.ready.setdefault(pod["metadata"]["name"], time.clock_gettime(time.CLOCK_BOOTTIME))

    def since_start(self, role):
        """Returns the longest time from the start of the container's process to Ready of a role's pods."""
        return max(self.ready[name] - process_start(name) for name in (pod["metadata"]["name"] for pod in self.api.pods(role)))


def process_start(pod):
    """Returns when the process of a pod started, in seconds since the start of the machine."""
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"POD_NAME={pod}\0".encode() in (folder / "environ").read_bytes():
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                return int(fields[19]) / os.sysconf("SC_CLK_TCK")
    raise SystemExit(f"no process of the pod {pod}")


def install(table, api, values):
    start = time.monotonic()
    with contextlib.nullcontext() if EXISTING else ReadyTimes(api) as times:
        # The model of this machine instead of the hub's.
        run(*readme_command("install"), "-f", values, "--set", f"models.{NAME}.source={MODEL.name}", f"--timeout={ROLLOUT_SECONDS}s")
    installed = time.monotonic() - start
    wait("answer", answered)
    seconds = time.monotonic() - start
    table.seconds("helm install --wait, s", installed)
    table.seconds("helm install --wait to first token, s", seconds, 30)
    release = api.request("GET", f"/api/v1/namespaces/{NAMESPACE}/secrets/sh.helm.release.v1.{RELEASE}.v1")["data"]["release"]
    kilobytes = len(base64.b64decode(release)) / 1000
    table.require("release secret, kB", "≤ 500", f"{kilobytes:.0f}", kilobytes <= 500)
    # The processes of an existing cluster's pods are not on this machine. A router waits for its first decode node.
    for role in () if EXISTING else ("prefill", "decode", "router"):
        table.seconds(f"{role}: container start to Ready, s", times.since_start(role), 3)


def missing_resource_definition(table, api, values):
    """Installs before the definitions of custom resources exist, which Helm rejects."""
    result = subprocess.run(["helm", "install", RELEASE, CHART, "-f", values], capture_output=True, text=True)
    words = "needs the kind PodMonitor of monitoring.coreos.com/v1, which this cluster lacks"
    table.require("bad input: Helm names a missing kind of object", True, words in result.stderr)


# Bad values, and the message that kubectl shows in the description or in the log of a pod.
DESCRIBED, LOGGED = (
    {"existingSecret=absent": 'secret "absent" not found',
     f"models.{NAME}.volume.hostPath=null,models.{NAME}.volume.persistentVolumeClaim.claimName=absent":
         'persistentvolumeclaim "absent" not found',
     "nodes.resources.limits.memory=400Mi,nodes.resources.requests.memory=400Mi":
         "exceed the container's memory limit of 400 MiB"},
    {"etcd.bundled=false,router.env[0].name=BATON_CLUSTER_DECODE,router.env[0].value=dns:absent:50061":
         "cannot resolve cluster.decode = dns:absent:50061",
     "etcd.bundled=false,etcd.endpoints[0]=http://absent:2379": "etcd is unreachable: dns error"})


def bad_input(table, api, values):
    """Installs with bad input and looks for the message where an operator looks first."""
    found = 0
    for command, messages in ((("describe", "pods"), DESCRIBED), (("logs", "--tail=-1"), LOGGED)):
        for settings, message in messages.items():
            run("helm", "install", "bad", CHART, "-f", values, "--set", settings)
            # kubectl fails while a container has not started.
            show = ["kubectl", *command, "-l", "app.kubernetes.io/instance=bad"]
            wait(f"message: {message}", lambda: message in subprocess.run(show, capture_output=True, text=True).stdout)
            found += 1
            run("helm", "uninstall", "bad", "--wait")
    table.require("bad input: messages of pods", len(DESCRIBED) + len(LOGGED), found)
    run("helm", "install", "bad", CHART, "-f", values, "--set", "telemetry.config.otlp=http://absent:4317", "--wait")
    wait("answer without a collector", lambda: answered(BAD_ROUTER))
    warning = "cannot send traces to the OTLP endpoint"
    wait(f"warning: {warning}", lambda: warning in run("kubectl", "logs", "deployment/bad-baton-router"))
    run("helm", "uninstall", "bad", "--wait")


def second_release(table, api, values):
    """Installs another release beside the first, with the longest name and the oldest Helm."""
    name = "r" * 53
    run(OLDEST_HELM, "install", name, CHART, "-f", values, "--wait", f"--timeout={ROLLOUT_SECONDS}s")
    selector = f"labelSelector=app.kubernetes.io/instance={name},app.kubernetes.io/component=router"
    [service] = api.request("GET", f"/api/v1/namespaces/{NAMESPACE}/services?{selector}")["items"]
    other = f"{service['metadata']['name']}.{NAMESPACE}.svc.cluster.local:8000"
    wait("answer of the second release", lambda: answered(other))
    nodes = []
    for router in (ROUTER, other):
        with urllib.request.urlopen(f"http://{router}/health", timeout=5) as response:
            health = json.load(response)
            nodes.append((health["prefill_nodes"], health["decode_nodes"]))
    version = run(OLDEST_HELM, "version", "--template", "{{.Version}}")
    table.require(f"a second release, installed by Helm {version}: nodes of each router", [(1, 1)] * 2, nodes)
    run(OLDEST_HELM, "uninstall", name, "--wait")


def upgrade(table, api, values, what):
    """Upgrades to another image and back, under load."""
    if not EXISTING:
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
    logs = run("kubectl", "logs", "--tail=-1", "-l", ROUTERS)
    message = "keeping the last known members"
    table.require("bad input: etcd lost after the installation is logged", True, message in logs)


def evict_all(table, api):
    with table.under_load("every pod evicted in turn"):
        for pod in api.pods():
            api.evict(pod["metadata"]["name"])
            settled()


def trace(table, api):
    """Sends one request with a trace id and looks for its spans in the collector and for its log lines."""
    trace_id = secrets.token_hex(16)
    stream(Load(ROUTER, NAME).connect(), NAME, *golden()[-1], headers={"traceparent": f"00-{trace_id}-{'1' * 16}-01"})

    def exported(signal, resources, scopes, records):
        """Returns the resource and the record of everything with the trace id that the collector has written."""
        # The collector may have written a part of the last line.
        lines, _, _ = (TARGET / f"k8s/logs/{signal}.json").read_text().rpartition("\n")
        return [(json.dumps(resource["resource"]), record)
                for line in lines.splitlines() if trace_id in line
                for resource in json.loads(line)[resources] for scope in resource[scopes]
                for record in scope[records] if record.get("traceId") == trace_id]

    def spans():
        found = exported("traces", "resourceSpans", "scopeSpans", "spans")
        return len(found) >= 8 and found

    spans = wait("trace with eight spans in the collector", spans)
    lines = wait("log line with the trace id in the collector",
                 lambda: exported("logs", "resourceLogs", "scopeLogs", "logRecords"))
    pods = {pod["metadata"]["name"] for pod in serving(api)}
    named = lambda found: {pod for pod in pods if any(f'"{pod}"' in resource for resource, _ in found)}  # noqa: E731
    table.require("one request: spans in the collector", 8, len(spans), len(spans) >= 8)
    table.require("one request: pods that its spans name", 3, len(named(spans)))
    table.require("one request: log lines with its trace id in the collector", "≥ 1", len(lines), bool(named(lines)))


def panels(table, values):
    """Requires data in all panels and scaling queries, and everything that alerts select, in a Prometheus that gets metrics over
    OTLP only."""
    # With one slot requests wait in the router.
    settings = "router.config.disaggregate=always,nodes.config.slots=1,nodes.config.waiting_max=0,nodes.config.speculate=ngram"
    tier = 'nodes.tier={"config": {"disk_size": "16MiB"}, "volume": {"emptyDir": {}}}'
    helm("upgrade", values, "--set", settings, "--set-json", tier, "--wait")
    settled()
    labels = {"namespace": NAMESPACE, "release": RELEASE, "model": NAME}
    # Pods send metrics every 10 s.
    queries = [*dashboards.panels("60s", labels), *dashboards.scaling("helm", NAME)]
    # Only scrapes have `up`.
    queries += [it for it in dashboards.alerts() if not it[1].startswith("up{")]
    # This release has no API keys and no weight updates.
    absent = ("baton_api_key_", "baton_weights_pause_", "baton_weights_update_duration_")
    queries = [it for it in queries if not any(name in it[1] for name in absent)]
    missing = dashboards.without_data(queries, PROMETHEUS_OTLP, BIN / "baton", ROUTER)
    for name, query in missing:
        print(f"  no data: {name}: {query}", flush=True)
    table.require("queries of panels, autoscaling and alerts with data over OTLP", len(queries), len(queries) - len(missing))
    helm("upgrade", values, "--wait")
    settled()


def start_prometheus(api):
    """Starts a Prometheus with the chart's PodMonitor and rules, whose times are a tenth, so that minutes take seconds."""
    monitor, rules = (api.request("GET", f"/apis/monitoring.coreos.com/v1/namespaces/{NAMESPACE}/{kind}/{RELEASE}-{name}")["spec"]
                      for kind, name in (("podmonitors", "pods"), ("prometheusrules", "alerts")))
    folder = PROMETHEUS_FOLDER
    folder.mkdir()
    discover(api)
    faster = re.sub(r"\b(\d+)m\b", lambda minutes: f"{int(minutes[1]) * 6}s", json.dumps(rules))
    (folder / "rules.json").write_text(faster)

    def relabeling(rule):
        return {re.sub("[A-Z]", lambda letter: "_" + letter[0].lower(), key): value for key, value in rule.items()}

    # What the Prometheus operator makes of a PodMonitor, but for the discovery of pods, without which Prometheus builds faster.
    scrapes = [{
        "job_name": f"pods-{index}",
        "file_sd_configs": [{"files": [str(folder / "pods.json")]}],
        "relabel_configs": [
            {"source_labels": ["__meta_kubernetes_pod_container_port_name"], "regex": endpoint["port"], "action": "keep"},
            *map(relabeling, endpoint.get("relabelings", [])),
        ],
        "metric_relabel_configs": list(map(relabeling, endpoint.get("metricRelabelings", []))),
    } for index, endpoint in enumerate(monitor["podMetricsEndpoints"])]
    (folder / "prometheus.json").write_text(json.dumps({
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(folder / "rules.json")], "scrape_configs": scrapes}))
    command = ["prometheus", f"--config.file={folder}/prometheus.json", f"--storage.tsdb.path={folder}/data",
               f"--web.listen-address={PROMETHEUS}"]
    return subprocess.Popen(command, stderr=(TARGET / "k8s/logs/prometheus-alerts.log").open("w"))


def discover(api):
    """Tells Prometheus the ports of the release's pods."""
    targets = []
    for pod in serving(api):
        labels = {f"__meta_kubernetes_pod_label_{re.sub('[^a-z]', '_', name)}": value
                  for name, value in pod["metadata"]["labels"].items()}
        labels |= {"__meta_kubernetes_pod_name": pod["metadata"]["name"], "namespace": NAMESPACE}
        for port in pod["spec"]["containers"][0]["ports"]:
            if ip := pod["status"].get("podIP"):
                targets.append({"targets": [f"{ip}:{port['containerPort']}"],
                                "labels": labels | {"__meta_kubernetes_pod_container_port_name": port["name"]}})
    partial = PROMETHEUS_FOLDER / "pods.new"
    partial.write_text(json.dumps(targets))
    partial.rename(PROMETHEUS_FOLDER / "pods.json")


def query(text):
    """Returns the labels of the series that a query finds."""
    url = f"http://{PROMETHEUS}/api/v1/query?query={urllib.parse.quote(text)}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return [series["metric"] for series in json.load(answer)["data"]["result"]]


def firing(api):
    discover(api)
    return {it["alertname"] for it in query(f'ALERTS{{alertstate="firing", namespace="{NAMESPACE}", release="{RELEASE}"}}')}


def alerts(table, api, values):
    """Provokes alerts. Each fires, and is silent before."""
    provocations = {
        "BatonNoDecodeNode": f"models.{NAME}.decode.replicas=0",
        "BatonOverloaded": "router.config.requests_max=1",
        # A node with another dtype has another fingerprint.
        "BatonNoPartner": f"models.{NAME}.decode.env[0].name=BATON_MODEL_DTYPE,models.{NAME}.decode.env[0].value=bf16",
    }
    prometheus = start_prometheus(api)
    try:
        wait("scrape of all pods", lambda: is_listening() and len(query("up == 1")) == len(serving(api)))
        fired = set()
        for name, settings in provocations.items():
            helm("upgrade", values, "--wait")
            settled()
            # Rates look back over half a minute.
            wait(f"silence of {name}", lambda: name not in firing(api))
            helm("upgrade", values, "--set", settings, "--wait")
            # Without a decode node requests would only wait.
            with contextlib.nullcontext() if name == "BatonNoDecodeNode" else Load(ROUTER, NAME, streams=0, rate=8):
                wait(f"alert {name}", lambda: name in firing(api))
            fired |= firing(api)
        # Updates and requests of the test may provoke further alerts.
        if others := fired - set(provocations):
            print(f"  other alerts that fired: {sorted(others)}", flush=True)
        table.require("alerts that fire, each provoked", sorted(provocations), sorted(fired & set(provocations)))
    finally:
        prometheus.terminate()
        prometheus.wait()


def is_listening():
    try:
        query("up")
    except OSError:
        return False
    return True


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
                if steps(api, pod):
                    served[name] = time.monotonic()
            return len(served) == 2

        wait("request on both new decode nodes", all_serve)
        helm("upgrade", write_values("few", router=1, prefill=1, decode=1), "--wait")
        wait("end of two decode nodes", lambda: len(api.pods("decode")) == 1)
    seconds = max(served[name] - ready[name] for name in served)
    table.seconds("a new decode node's first request after Ready, s", seconds, 2)


def steps(api, pod):
    """Returns the tokens that a node's steps have processed."""
    return sum(map(float, re.findall(r"^baton_step_tokens_total\S* (\S+)$", api.metrics(pod), re.M)))


def main():
    table, api = Table(), KubectlApi() if EXISTING else Api()
    few = write_values("few", router=1, prefill=1, decode=1)
    many = write_values("many", router=2, prefill=2, decode=2)
    try:
        if not EXISTING:
            missing_resource_definition(table, api, few)
            dry_run(table, api)
            place_on_gpus(table, api)
        install(table, api, few)
        run(*readme_command("test"))
        if not EXISTING:
            trace(table, api)
            panels(table, few)
            second_release(table, api, few)
        bad_input(table, api, few)
        upgrade(table, api, few, "1P1D")
        scale(table, api)
        helm("upgrade", many, "--wait")
        upgrade(table, api, many, "2P2D")
        delete_decode(table, api)
        delete_etcd(table, api)
        evict_all(table, api)
        if not EXISTING:
            alerts(table, api, few)
    finally:
        table.print()
    return table.failed > 0


if __name__ == "__main__":
    sys.exit(main())
