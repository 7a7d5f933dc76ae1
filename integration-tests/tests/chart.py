"""Tests of the Helm chart without a cluster. Arguments: folder of the tools, folder of Baton's programs."""

import contextlib
import http.server
import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import unittest

TOOLS, PROGRAMS = map(pathlib.Path, sys.argv[1:3])
sys.path.insert(0, str(TOOLS / "python"))

import kubernetes_validate  # noqa: E402
import yaml  # noqa: E402

HERE = pathlib.Path(__file__).parent
CHART = HERE.parents[1] / "helm" / "baton"
HELMS = [TOOLS / "helm3", TOOLS / "helm4"]
PROMTOOL = shutil.which("promtool") or TOOLS / "debian/usr/bin/promtool"
OLDEST, NEWEST = "1.29", "1.37"
GROUPED = HERE / "chart" / "values" / "grouped.yaml"
EVERYTHING = HERE / "chart" / "values" / "everything.yaml"
RDMA = HERE / "chart" / "values" / "rdma.yaml"
IMAGE_VOLUME = HERE / "chart" / "values" / "image_volume.yaml"
VALUES = sorted(CHART.glob("values*.yaml")) + sorted((HERE / "chart" / "values").glob("*.yaml"))
# Kinds of custom resources, whose schemas are not part of Kubernetes.
CUSTOM = {
    "PodMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
    "ScaledObject": "keda.sh/v1alpha1",
    "HTTPRoute": "gateway.networking.k8s.io/v1",
    "GRPCRoute": "gateway.networking.k8s.io/v1",
}
SECRET = ("--set", "existingSecret=mine")
WITH_MODELS = [*(HERE / "chart" / "values").glob("*.yaml")]
RESTRICTED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def helm(program, *arguments):
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)


def with_model(*arguments):
    """The arguments, with a model unless they have one, and with the Secret that a chart without a cluster needs."""
    has_model = any(re.search(r"\bmodels\b", str(it)) or it in WITH_MODELS for it in arguments)
    return (*SECRET, *(() if has_model else ("--set", "models.m.source=hf:a/b")), *arguments)


def template(*arguments, program=HELMS[0], release="baton"):
    apis = [word for kind, group in CUSTOM.items() for word in ("--api-versions", f"{group}/{kind}")]
    return helm(program, "template", release, CHART, *apis, *with_model(*arguments))


def render(*arguments, **options):
    run = template(*arguments, **options)
    assert run.returncode == 0, run.stderr
    return run.stdout


def objects(*arguments, **options):
    return [it for it in yaml.safe_load_all(render(*arguments, **options)) if it]


def named(found, kind, name):
    [it] = [it for it in found if it["kind"] == kind and it["metadata"]["name"] == name]
    return it


def pod_specs(found):
    for it in found:
        if it["kind"] == "Deployment":
            yield it["metadata"]["name"], it["spec"]["template"]["spec"]
        elif it["kind"] == "Pod":
            yield it["metadata"]["name"], it["spec"]


@contextlib.contextmanager
def cluster_with_level(level):
    """Serves what Helm reads of a cluster: a namespace that enforces a Pod Security level. Yields the arguments for Helm."""
    label = {"pod-security.kubernetes.io/enforce": level} if level else {}
    kinds = [("namespaces", "Namespace", False), ("secrets", "Secret", True)]
    resources = [{"name": name, "kind": kind, "namespaced": spaced, "verbs": ["get"]} for name, kind, spaced in kinds]
    answers = {
        "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
        "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": resources},
        "/api/v1/namespaces/default": {"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": "default", "labels": label}},
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            answer = answers.get(self.path.partition("?")[0])
            body = json.dumps(answer or {"kind": "Status", "reason": "NotFound", "code": 404}).encode()
            self.send_response(200 if answer else 404)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield "--dry-run=server", "--disable-openapi-validation", "--kube-apiserver", f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def for_each_values_file(test):
    def run(self):
        for path in VALUES:
            with self.subTest(values=path.name):
                test(self, path)

    return run


class Chart(unittest.TestCase):
    @for_each_values_file
    def test_every_values_file_is_linted_by_both_helms(self, path):
        for program in HELMS:
            run = helm(program, "lint", "--strict", CHART, *with_model("--values", path))
            self.assertEqual(run.returncode, 0, run.stdout + run.stderr)

    @for_each_values_file
    def test_both_helms_render_the_same(self, path):
        one, other = (render("--values", path, program=program) for program in HELMS)
        self.assertEqual(one, other)

    @for_each_values_file
    def test_objects_match_the_oldest_and_the_newest_api(self, path):
        found = objects("--values", path)
        for it in found:
            if it["kind"] in CUSTOM:
                self.assertEqual(it["apiVersion"], CUSTOM[it["kind"]])
                continue
            for version in (OLDEST, NEWEST):
                if path != IMAGE_VOLUME or version == NEWEST:
                    kubernetes_validate.validate(it, version, strict=True)

    def test_one_values_file_has_every_kind(self):
        kinds = {it["kind"] for it in objects("--values", EVERYTHING)}
        self.assertLessEqual({*CUSTOM, "HorizontalPodAutoscaler", "PodDisruptionBudget", "Ingress"}, kinds)

    @for_each_values_file
    def test_programs_accept_their_configuration(self, path):
        found = objects("--values", path)
        for it in found:
            if it["kind"] != "ConfigMap" or "baton.toml" not in it.get("data", {}):
                continue
            # The environment of the pod, without values that only a running cluster can provide.
            container = named(found, "Deployment", it["metadata"]["name"])["spec"]["template"]["spec"]["containers"][0]
            names = {env["name"] for env in container["env"] if env["name"].startswith("BATON_")}
            # `baton up` passes the file to its nodes.
            program = container["command"][0]
            if program == "baton":
                program = "baton-decode-node"
            with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
                file.write(it["data"]["baton.toml"])
                file.flush()
                run = subprocess.run(
                    [PROGRAMS / program, "--config", file.name, "--explain-config"],
                    env=dict.fromkeys(names, "a-text-of-16-bytes"),
                    capture_output=True,
                    text=True,
                )
            self.assertEqual((run.returncode, run.stderr), (0, ""), it["data"]["baton.toml"])

    def test_large_integers_stay_integers(self):
        found = objects("--values", EVERYTHING)
        toml = named(found, "ConfigMap", "baton-big-decode")["data"]["baton.toml"]
        self.assertIn("\nblocks = 16777216\n", toml)
        self.assertIn("\nslots = 64\n", toml)

    @for_each_values_file
    def test_pods_are_restricted_and_have_no_token(self, path):
        for name, spec in pod_specs(objects("--values", path)):
            self.assertIs(spec["automountServiceAccountToken"], False, name)
            self.assertIs(spec["enableServiceLinks"], False, name)
            self.assertIs(spec["securityContext"]["runAsNonRoot"], True, name)
            self.assertEqual(spec["securityContext"]["seccompProfile"], {"type": "RuntimeDefault"}, name)
            [container] = spec["containers"]
            allowed = RESTRICTED
            if path == RDMA and name.startswith("baton-m-"):
                capabilities = {"drop": ["ALL"], "add": ["IPC_LOCK"]}
                allowed = RESTRICTED | {"runAsUser": 0, "runAsNonRoot": False, "capabilities": capabilities}
            self.assertEqual(container["securityContext"], allowed, name)
            self.assertEqual(container["terminationMessagePolicy"], "FallbackToLogsOnError", name)

    def test_model_caches_are_writable_and_models_are_not(self):
        [container] = dict(pod_specs(objects("--values", EVERYTHING)))["baton-big-prefill"]["containers"]
        mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
        self.assertEqual((mounts["/cache"], mounts["/models/big"]), (False, True))

    def test_pods_share_the_claim_of_the_model_cache(self):
        found = objects("--values", EVERYTHING)
        claim = named(found, "PersistentVolumeClaim", "baton-cache")
        self.assertEqual(claim["spec"]["resources"]["requests"], {"storage": "500Gi"})
        for name, spec in pod_specs(found):
            if name != "baton-check":
                [cache] = [it for it in spec["volumes"] if it["name"] == "cache"]
                self.assertEqual(cache["persistentVolumeClaim"], {"claimName": "baton-cache"}, name)

    def test_entries_of_the_user_replace_those_of_the_chart(self):
        for component, pods in (("nodes", ["baton-m-prefill", "baton-m-decode"]), ("router", ["baton-router"])):
            values = {
                "env": [{"name": "HF_HOME", "value": "/hub"}, {"name": "MINE", "value": "1"}],
                "volumes": [{"name": "tmp", "emptyDir": {"medium": "Memory"}}, {"name": "mine", "emptyDir": {}}],
                "volumeMounts": [{"name": "mine", "mountPath": "/cache"}, {"name": "mine", "mountPath": "/mine"}],
            }
            with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
                yaml.safe_dump({component: values}, file)
                file.flush()
                before, found = dict(pod_specs(objects())), dict(pod_specs(objects("--values", file.name)))
            for name in pods:
                for field, key in (("env", "name"), ("volumeMounts", "mountPath"), ("volumes", "name")):
                    lists = [it if field == "volumes" else it["containers"][0] for it in (before[name], found[name])]
                    old, new = ({entry[key]: entry for entry in it[field]} for it in lists)
                    self.assertEqual(len(new), len(lists[1][field]), (name, field))
                    expected = old | {entry[key]: entry for entry in values[field]}
                    self.assertEqual(new, expected, (name, field))

    def test_security_contexts_are_values_and_null_removes_a_field(self):
        settings = "podSecurityContext.runAsUser=null,podSecurityContext.fsGroup=7,securityContext.readOnlyRootFilesystem=false"
        for program in HELMS:
            found = dict(pod_specs(objects("--set", settings, program=program)))
            self.assertEqual(len(found), 5, found.keys())
            for name, spec in found.items():
                self.assertNotIn("runAsUser", spec["securityContext"], name)
                self.assertEqual(spec["securityContext"]["fsGroup"], 7, name)
                [container] = spec["containers"]
                self.assertEqual(container["securityContext"], RESTRICTED | {"readOnlyRootFilesystem": False}, name)

    def test_a_value_of_a_model_changes_without_the_others(self):
        # As `helm upgrade --reuse-values --set` merges them.
        settings = "models.big.prefill.priorityClassName=low"
        for program in HELMS:
            one, other = (objects("--values", EVERYTHING, *more, program=program) for more in ((), ("--set", settings)))
            changed = [(a["kind"], a["metadata"]["name"]) for a, b in zip(one, other, strict=True) if a != b]
            self.assertEqual(changed, [("Deployment", "baton-big-prefill")])

    def test_the_operators_api_has_a_service_if_it_has_keys(self):
        found = objects("--values", EVERYTHING)
        service = named(found, "Service", "baton-router-admin")["spec"]
        self.assertEqual(service["sessionAffinity"], "ClientIP")
        [container] = dict(pod_specs(found))["baton-router"]["containers"]
        self.assertIn({"name": "admin", "containerPort": 8002}, container["ports"])
        toml = named(found, "ConfigMap", "baton-router")["data"]["baton.toml"]
        for line in ('admin = "0.0.0.0:8002"', 'admin_keys = "/etc/baton/admin-keys/keys.toml"'):
            self.assertIn(f"\n{line}\n", toml)
        found = objects()
        self.assertNotIn("baton-router-admin", [it["metadata"]["name"] for it in found])
        self.assertNotIn("admin", named(found, "ConfigMap", "baton-router")["data"]["baton.toml"])

    def test_namespaces_with_a_pod_security_level_refuse_privileged_pods(self):
        cases = {
            "models.m.source=a,models.m.volume.hostPath.path=/a": "volume model-m of router is a hostPath",
            "nodes.tier.volume.hostPath.path=/a": "volume tier of models.m.prefill is a hostPath",
            "modelCache.volume.hostPath.path=/a": "volume cache of router is a hostPath",
            "router.volumes[0].name=v,router.volumes[0].hostPath.path=/a": "volume v of router is a hostPath",
            "nodes.gpus=1,gpu.rdma.resource=rdma/hca": "gpu.rdma.ipcLock is true: pods run as root",
            "nodes.gpus=1,gpu.hostNetwork=true,networkPolicy.enabled=false": "gpu.hostNetwork is true",
        }
        for level, is_refused in (("restricted", True), ("baseline", True), ("privileged", False), (None, False)):
            with cluster_with_level(level) as arguments:
                for settings, words in cases.items():
                    for program in HELMS:
                        run = template(*arguments, "--set", settings, program=program)
                        # Helm has rendered the chart when it misses the other kinds of this cluster.
                        is_rendered = "kind: Deployment" in run.stdout or 'no matches for kind "Deployment"' in run.stderr
                        self.assertEqual(is_rendered, not is_refused, run.stderr)
                        self.assertEqual(words in run.stderr, is_refused)
                        self.assertEqual("which namespace default refuses; expected its label" in run.stderr, is_refused)

    def test_a_successful_check_leaves_no_pod(self):
        check = named(objects(), "Pod", "baton-check")
        self.assertIn("hook-succeeded", check["metadata"]["annotations"]["helm.sh/hook-delete-policy"].split(","))
        # Helm deletes all other objects.
        for it in objects("--values", EVERYTHING):
            annotations = it["metadata"].get("annotations", {})
            self.assertNotIn("helm.sh/resource-policy", annotations)
            self.assertEqual("helm.sh/hook" in annotations, it["metadata"]["name"] == "baton-check")

    def test_kv_tiers_of_a_pool_reach_its_nodes_with_their_volume(self):
        found = objects("--values", EVERYTHING)
        for pool, volume, lines, absent in (
            ("big-prefill", "hostPath", ('disk_size = "1TiB"', 'admission = "always"'), "host_memory"),
            ("big-decode", "ephemeral", ('disk_size = "1TiB"', 'admission = "always"'), "host_memory"),
            ("two-prefill", None, ('host_memory = "64GiB"',), "disk_path"),
        ):
            name = f"baton-{pool}"
            spec = dict(pod_specs(found))[name]
            [container] = spec["containers"]
            toml = named(found, "ConfigMap", name)["data"]["baton.toml"]
            tier = toml.partition("[tier]\n")[2].partition("\n[")[0].splitlines()
            self.assertLessEqual({*lines}, {*tier})
            self.assertNotIn(absent, "".join(tier))
            self.assertIn('[weights]\nplace = "shadow"\n', toml.replace("\n\n", "\n"))
            volumes = [it for it in spec["volumes"] if it["name"] == "tier"]
            mounts = [it for it in container["volumeMounts"] if it["name"] == "tier"]
            if volume is None:
                self.assertEqual((volumes, mounts), ([], []))
                continue
            self.assertIn(f'disk_path = "/tier/{name}"', tier)
            self.assertEqual([it.keys() for it in volumes], [{"name", volume}])
            self.assertEqual(mounts, [{"name": "tier", "mountPath": "/tier"}])
        router = named(found, "ConfigMap", "baton-router")["data"]["baton.toml"]
        self.assertNotIn("[tier]", router)

    def test_certificate_of_the_cluster_reaches_routers_and_nodes(self):
        found = objects("--set", "clusterTls.secret=cert,clusterTls.name=a.example")
        services = [name for name, _ in pod_specs(found) if not name.endswith(("etcd", "check"))]
        self.assertGreaterEqual(len(services), 3, services)
        for name, spec in pod_specs(found):
            if name not in services:
                continue
            toml = named(found, "ConfigMap", name)["data"]["baton.toml"]
            for line in (
                'tls_cert = "/etc/baton/cluster/tls.crt"',
                'tls_key = "/etc/baton/cluster/tls.key"',
                'tls_ca = "/etc/baton/cluster/ca.crt"',
                'tls_name = "a.example"',
            ):
                self.assertIn(f"\n{line}\n", toml, name)
            [container] = spec["containers"]
            mounts = {it["mountPath"]: it["name"] for it in container["volumeMounts"]}
            volumes = {it["name"]: it["secret"]["secretName"] for it in spec["volumes"] if "secret" in it}
            self.assertEqual(volumes[mounts["/etc/baton/cluster"]], "cert", name)

    def test_certificate_and_keys_of_clients_reach_routers_only(self):
        secrets = "router.tlsSecret=cert,router.keysSecret=keys"
        found = objects("--set", secrets)
        toml = named(found, "ConfigMap", "baton-router")["data"]["baton.toml"]
        for line in (
            'tls_cert = "/etc/baton/tls/tls.crt"',
            'tls_key = "/etc/baton/tls/tls.key"',
            'keys = "/etc/baton/keys/keys.toml"',
        ):
            self.assertIn(f"\n{line}\n", toml)
        for name, spec in pod_specs(found):
            [container] = spec["containers"]
            mounts = {it["mountPath"]: it["name"] for it in container.get("volumeMounts", ()) if it.get("readOnly")}
            volumes = {it["name"]: it["secret"]["secretName"] for it in spec.get("volumes", ()) if "secret" in it}
            is_router = name == "baton-router"
            expected = {"tls": "cert", "keys": "keys"} if is_router else {}
            if name == "baton-check":
                # `helm test` trusts the certificate, and never sees the private key.
                [tls] = [it["secret"] for it in spec["volumes"] if it["name"] == "tls"]
                self.assertEqual([it["key"] for it in tls["items"]], ["tls.crt"])
                expected = {"tls": "cert"}
            self.assertEqual(volumes, expected, name)
            self.assertEqual(mounts.get("/etc/baton/tls"), "tls" if "tls" in expected else None, name)
            self.assertEqual(mounts.get("/etc/baton/keys"), "keys" if is_router else None, name)
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                scheme = container.get(probe, {}).get("httpGet", {}).get("scheme")
                self.assertEqual(scheme, "HTTPS" if is_router else None, (name, probe))
        ports = named(found, "Service", "baton-router")["spec"]["ports"]
        self.assertEqual([port["appProtocol"] for port in ports], ["https", "https"])
        [container] = named(found, "Pod", "baton-check")["spec"]["containers"]
        self.assertIn("https://baton-router:8000", container["command"])

        found = objects("--set", "router.keysSecret=keys,router.checkKeySecret=mine")
        [container] = named(found, "Pod", "baton-check")["spec"]["containers"]
        [env] = container["env"]
        self.assertEqual((env["name"], env["valueFrom"]["secretKeyRef"]["name"]), ("BATON_API_KEY", "mine"))
        ports = named(found, "Service", "baton-router")["spec"]["ports"]
        self.assertEqual([port["appProtocol"] for port in ports], ["http", "kubernetes.io/h2c"])

    def test_a_group_has_all_nodes_and_gpus_of_a_host(self):
        found = objects("--values", GROUPED)
        deployments = {it["metadata"]["name"]: it for it in found if it["kind"] == "Deployment"}
        self.assertEqual(sorted(deployments), ["baton-big-group", "baton-router", "baton-two-group"])
        spec = deployments["baton-big-group"]["spec"]
        self.assertEqual(spec["replicas"], 2)
        [container] = spec["template"]["spec"]["containers"]
        command = "baton up --no-router --health 0.0.0.0:9090 --prefill 1 --decode 3 --gpus 0-7 --config /etc/baton/config/baton.toml"
        self.assertEqual(container["command"], command.split())
        self.assertEqual(container["resources"]["limits"], {"nvidia.com/gpu": 8})
        self.assertIn({"name": "shm", "mountPath": "/dev/shm"}, container["volumeMounts"])
        toml = named(found, "ConfigMap", "baton-big-group")["data"]["baton.toml"]
        self.assertIn("\ntp = 2\n", toml)
        # Nodes of one container see each other's GPUs, so nothing keeps KV from ipc.
        self.assertNotIn("transport", toml)

        router = named(found, "ConfigMap", "baton-router")["data"]["baton.toml"]
        members = lambda model, *ports: [f'"dns:baton-{model}-group.default.svc:{port}"' for port in ports]
        self.assertIn(f"prefill = [{','.join(members('big', 50100))}]", router)
        decode = members("big", 50101, 50102, 50103) + members("two", 50100)
        self.assertIn(f"decode = [{','.join(decode)}]", router)
        endpoints = named(found, "PodMonitor", "baton-pods")["spec"]["podMetricsEndpoints"]
        self.assertEqual([it["port"] for it in endpoints], ["metrics", "prefill-0", "decode-0", "decode-1", "decode-2"])

    def test_nodes_reach_the_grpc_and_kv_ports_of_nodes(self):
        for arguments, ports in (
            ((), [{"port": "grpc"}, {"port": "control"}, {"port": "data"}]),
            (("--set", "layout=grouped"), [{"port": 50100, "endPort": 50399}]),
            (("--set", "transfer.config.transport=nccl"), None),
            (("--set", "transfer.config.transport=auto"), [{"port": "grpc"}, {"port": "control"}, {"port": "data"}]),
            (("--set", "transfer.config.transport=auto,gpu.rdma.resource=rdma/hca"), None),
        ):
            policy = named(objects(*arguments), "NetworkPolicy", "baton-nodes")
            [rule] = [
                it
                for it in policy["spec"]["ingress"]
                if any("matchExpressions" in peer["podSelector"] for peer in it.get("from", ()))
            ]
            self.assertEqual(rule.get("ports"), ports, arguments)

    def test_ids_of_nodes_in_a_group_are_short_enough(self):
        models = f"models.{'m' * 30}.source=hf:a/b"
        found = objects("--set", f"layout=grouped,{models}", release="r" * 53)
        component = lambda it: it["metadata"]["labels"]["app.kubernetes.io/component"]
        [group] = [it for it in found if it["kind"] == "Deployment" and component(it) == "group"]
        self.assertLessEqual(len(f"{group['metadata']['name']}-0123456789-abcde-prefill-10"), 64)

    def test_budgets_exist_from_two_replicas_on(self):
        budgets = lambda *arguments: sorted(
            it["metadata"]["name"] for it in objects(*arguments) if it["kind"] == "PodDisruptionBudget"
        )
        self.assertEqual(budgets(), [])
        self.assertEqual(budgets("--set", "nodes.replicas=2"), ["baton-m-decode", "baton-m-prefill"])
        self.assertEqual(budgets("--set", "router.autoscaling.enabled=true"), ["baton-router"])
        scaled = "nodes.autoscaling.enabled=true,monitoring.prometheus=http://p:9090"
        self.assertEqual(budgets("--set", scaled), ["baton-m-decode", "baton-m-prefill"])
        self.assertEqual(budgets("--set", f"{scaled},nodes.autoscaling.max=1"), [])

    def test_replicas_are_absent_where_something_scales(self):
        for it in objects("--values", EVERYTHING):
            if it["kind"] == "Deployment":
                scales = it["metadata"]["name"] in ("baton-router", "baton-big-decode", "baton-two-prefill")
                self.assertEqual("replicas" in it["spec"], not scales, it["metadata"]["name"])

    def test_pools_without_data_keep_their_replicas(self):
        found = objects("--set", "nodes.autoscaling.enabled=true,monitoring.prometheus=http://p:9090")
        triggers = [trigger for it in found if it["kind"] == "ScaledObject" for trigger in it["spec"]["triggers"]]
        self.assertEqual(len(triggers), 5)
        tests = []
        for trigger in triggers:
            self.assertEqual(trigger["metadata"]["ignoreNullValues"], "false")
            query = trigger["metadata"]["query"]
            labels = re.search(r"{.*?}", query)[0]
            expect = lambda at, *values: {
                "expr": query,
                "eval_time": at,
                "exp_samples": [{"labels": "{}", "value": value} for value in values],
            }
            series = lambda metric, values: {"series": f"{metric}{labels}", "values": values}
            [metric] = re.findall(r"baton_\w+", query)
            is_rate = "rate(" in query
            tests += [
                # Scrapes fail from minute 11 on.
                {
                    "interval": "1m",
                    "input_series": [series(metric, "0+360x10 stale" if is_rate else "6x10 stale")],
                    "promql_expr_test": [expect("10m", 6), expect("12m")],
                },
                # Nodes that have made no step yet.
                {
                    "interval": "1m",
                    "input_series": [series(metric, "0x10")],
                    "promql_expr_test": [expect("4m", 0)],
                },
            ]
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump({"tests": tests}, file)
            run = subprocess.run([PROMTOOL, "test", "rules", file.name], capture_output=True, text=True)
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)

    def test_own_values_of_a_pool_win_even_if_false_or_zero(self):
        found = objects(
            "--set", "nodes.autoscaling.enabled=true,monitoring.prometheus=http://p:9090,nodes.replicas=3",
            "--set", "models.m.source=hf:a/b",
            "--set", "models.m.decode.autoscaling.enabled=false,models.m.decode.replicas=0",
        )  # fmt: skip
        self.assertEqual(named(found, "Deployment", "baton-m-decode")["spec"]["replicas"], 0)
        self.assertNotIn("replicas", named(found, "Deployment", "baton-m-prefill")["spec"])

    def test_routers_and_nodes_have_the_cluster_secret(self):
        seen = set()
        for layout in ("separate", "grouped"):
            for _, spec in pod_specs(objects("--set", f"layout={layout}")):
                for container in spec["containers"]:
                    if container["name"] not in ("baton-router", "baton-prefill", "baton-decode", "baton-group"):
                        continue
                    [secret] = [it["valueFrom"] for it in container["env"] if it["name"] == "BATON_CLUSTER_SECRET"]
                    self.assertEqual(secret, {"secretKeyRef": {"name": "mine", "key": "secret"}})
                    seen.add(container["name"])
        self.assertEqual(seen, {"baton-router", "baton-prefill", "baton-decode", "baton-group"})

    def test_helm_test_requires_the_prefill_nodes_that_exist(self):
        def required(*arguments):
            [container] = dict(pod_specs(objects(*arguments)))["baton-check"]["containers"]
            return [word for word in container["command"] if word.startswith("--prefill")]

        model = "models.m.source=hf:a/b"
        self.assertEqual(required(), ["--prefill=m"])
        self.assertEqual(required("--values", GROUPED), ["--prefill=Org/Big.Model"])
        # A pool that scales has no replicas of its own.
        scaled = "monitoring.prometheus=http://p:9090,nodes.autoscaling.enabled=true,nodes.replicas=0"
        self.assertEqual(required("--set", f"{model},{scaled}"), ["--prefill=m"])
        self.assertEqual(required("--set", f"{model},models.m.prefill.replicas=0"), [])
        self.assertEqual(required("--set", "router.config.disaggregate=never"), [])

    def test_grace_periods_cover_the_drain(self):
        grace = lambda *arguments: dict(pod_specs(objects(*arguments)))["baton-router"]["terminationGracePeriodSeconds"]
        drain = lambda time: ("--set", f"router.config.drain_timeout={time}")
        # No answer is cut: every request ends within router.timeout_max.
        self.assertEqual(grace(), 3620)
        self.assertEqual(grace("--set", "router.config.timeout_max=2h"), 7220)
        self.assertEqual([grace(*drain(time)) for time in ("0s", "1500ms", "2m", "1h")], [20, 22, 140, 3620])
        self.assertEqual(grace("--set", "router.config.drain_delay=15s,router.config.drain_timeout=20s"), 60)

    def test_rollouts_fail_five_minutes_after_the_load_time(self):
        for program in HELMS:
            found = objects("--set", "loadSeconds=120", program=program)
            deadlines = {it["metadata"]["name"]: it["spec"].get("progressDeadlineSeconds") for it in found if it["kind"] == "Deployment"}
            self.assertEqual(deadlines, {"baton-router": 420, "baton-m-prefill": 420, "baton-m-decode": 420, "baton-etcd": None})
            [container] = dict(pod_specs(found))["baton-router"]["containers"]
            self.assertEqual(container["startupProbe"]["failureThreshold"], 120)

    def test_a_name_that_yaml_reads_as_a_number_stays_a_string(self):
        model = "models.405.source=hf:a/b"
        secrets = "router.tlsSecret=1,router.keysSecret=2,router.checkKeySecret=3,huggingFace.tokenSecret=4,existingSecret=5,nodes.shm=1"
        classes = "serviceAccountName=6,router.priorityClassName=7,nodes.priorityClassName=8,gateway.ingress.className=9"
        ingress = "gateway.ingress.enabled=true,gateway.ingress.hosts[0]=a"
        monitoring = "monitoring.podMonitor.enabled=true"
        for program in HELMS:
            found = objects("--set-string", ",".join((model, secrets, classes)), "--set", ingress, "--set", monitoring,
                            release="2024", program=program)
            for it in found:
                if it["kind"] not in CUSTOM:
                    kubernetes_validate.validate(it, NEWEST, strict=True)
            monitor = named(found, "PodMonitor", "2024-baton-pods")
            self.assertEqual(monitor["spec"]["selector"]["matchLabels"]["app.kubernetes.io/instance"], "2024")
            labels = named(found, "Deployment", "2024-baton-405-decode")["metadata"]["labels"]
            self.assertEqual((labels["app.kubernetes.io/instance"], labels["baton/model"]), ("2024", "405"))

    def test_kv_moves_by_tcp_between_containers_that_see_one_gpu(self):
        def toml(name, *settings):
            settings = ",".join(("models.m.source=hf:a/b", *settings))
            return named(objects("--set", settings), "ConfigMap", f"baton-{name}")["data"]["baton.toml"]

        tcp, gpus = '\ntransport = "tcp"\n', "models.m.decode.gpus=1"
        self.assertIn(tcp, toml("m-decode", gpus))
        self.assertNotIn("transport =", toml("m-prefill", gpus))
        self.assertIn('\ntransport = "nccl"\n', toml("m-decode", gpus, "transfer.config.transport=nccl"))
        self.assertNotIn("transport =", toml("m-group", "models.m.group.gpus=1,layout=grouped"))

    def test_pods_with_rdma_adapters_use_nccl(self):
        found = objects("--values", RDMA)
        for role in ("prefill", "decode"):
            name = f"baton-m-{role}"
            spec = dict(pod_specs(found))[name]
            [container] = spec["containers"]
            self.assertEqual(container["resources"]["limits"], {"nvidia.com/gpu": 8, "rdma/hca": 8})
            self.assertEqual((spec["hostNetwork"], spec["dnsPolicy"]), (True, "ClusterFirstWithHostNet"))
            self.assertIn('\ntransport = "nccl"\n', named(found, "ConfigMap", name)["data"]["baton.toml"])
        self.assertNotIn("hostNetwork", dict(pod_specs(found))["baton-router"])

        # A runtime without a limit on locked memory: the pods stay restricted.
        found = objects("--set", "nodes.gpus=1,gpu.rdma.resource=rdma/hca,gpu.rdma.ipcLock=false")
        spec = dict(pod_specs(found))["baton-m-decode"]
        [container] = spec["containers"]
        self.assertNotIn("runAsUser", container["securityContext"])
        self.assertEqual(container["resources"]["limits"], {"nvidia.com/gpu": 1, "rdma/hca": 1})
        self.assertNotIn("hostNetwork", spec)
        # NCCL opens ports of its own choice.
        policy = named(found, "NetworkPolicy", "baton-nodes")
        self.assertEqual([rule for rule in policy["spec"]["ingress"] if "ports" not in rule], [policy["spec"]["ingress"][1]])

        # Nodes without GPUs have no adapters.
        found = objects("--set", "gpu.rdma.resource=rdma/hca,gpu.hostNetwork=true,networkPolicy.enabled=false")
        for name, spec in pod_specs(found):
            [container] = spec["containers"]
            self.assertNotIn("hostNetwork", spec, name)
            self.assertNotIn("limits", container.get("resources", {}), name)

    def test_routers_look_up_only_pools_with_pods(self):
        def members(*settings):
            settings = ",".join(("models.m.source=hf:a/b,etcd.bundled=false", *settings))
            toml = named(objects("--set", settings), "ConfigMap", "baton-router")["data"]["baton.toml"]
            return [re.findall(r"dns:(.*?)\.", line) for line in re.findall(r"^(?:decode|prefill) = .*", toml, re.M)]

        self.assertEqual(members(), [["baton-m-decode"], ["baton-m-prefill"]])
        self.assertEqual(members("models.m.prefill.replicas=0"), [["baton-m-decode"], []])
        scaled = "nodes.replicas=0,nodes.autoscaling.enabled=true,monitoring.prometheus=http://p:9090"
        self.assertEqual(members(scaled), [["baton-m-decode"], ["baton-m-prefill"]])
        self.assertEqual(members("layout=grouped"), [["baton-m-group"], ["baton-m-group"]])
        self.assertEqual(members("layout=grouped", "models.m.group.replicas=0"), [[], []])

    def test_long_names_are_short_and_distinct(self):
        found = objects("--values", EVERYTHING, release="r" * 53)
        names = [(it["kind"], it["metadata"]["name"]) for it in found]
        self.assertEqual(len(names), len(set(names)))
        for _, name in names[:-1]:
            self.assertLessEqual(len(name), 63)
        models = [f"models.{'m' * 29}{i}.source=hf:a/b" for i in range(2)]
        found = objects("--set", ",".join(models), release="r" * 53)
        self.assertEqual(len([it for it in found if it["kind"] == "Deployment"]), 6)

    def test_two_releases_in_one_namespace_share_no_name_and_no_pod(self):
        one, other = (objects(release=release) for release in ("baton", "baton-2"))
        names = [{(it["kind"], it["metadata"]["name"]) for it in found} for found in (one, other)]
        self.assertFalse(names[0] & names[1])
        for found, release in ((one, "baton"), (other, "baton-2")):
            for it in found:
                if it["kind"] == "Deployment":
                    self.assertEqual(it["spec"]["selector"]["matchLabels"]["app.kubernetes.io/instance"], release)

    def test_bad_values_are_refused_with_their_path(self):
        cases = {
            ("router.replicsa=2",): "replicsa",
            ("router.config.timeuot=2m",): "timeuot",
            ("router.config.timeout=2",): "router.config.timeout",
            ("models.m.source=hf:a/b", "models.m.decode.config.slots=none"): "models.m.decode.config.slots",
            ("models.m.source=hf:a/b", "models.m.decode.config.grpc=0.0.0.0:1"): "grpc",
            ("models.m.dtype=f32",): "models.m.source is empty; expected hf:ORG/NAME",
            ("existingSecret=",): "existingSecret is empty",
            ("router.terminationGracePeriodSeconds=10",): "router.terminationGracePeriodSeconds is 10; expected at least 3620",
            ("nodes.terminationGracePeriodSeconds=34",): "models.m.prefill.terminationGracePeriodSeconds is 34",
            ("router.config.drain_delay=null",): "router.config.drain_delay is null; expected a duration such as 20s",
            ("nodes.config.drain_timeout=null",): "models.m.prefill.config.drain_timeout is null",
            ("models.Llama_3.source=hf:a/b",): "Llama_3",
            (f"models.{'m' * 31}.source=hf:a/b",): "m" * 31,
            ("models.m.source=hf:a/b", "models.o.source=hf:a/b", "models.o.config.special_tokens_in_content=parse"):
                "models.o.config.special_tokens_in_content is set; expected it only at models.m",
            ("models.m.source=llama",): 'models.m.source is "llama"; expected hf:ORG/NAME',
            ("models.m.source=hf:a/b", "models.o.source=hf:a/b", "models.o.name=m"): 'models.m and models.o have the same name, "m"',
            ("loadSeconds=3601",): "loadSeconds",
            ("models=null",): "models is empty; expected at least one model, such as --set models.smollm2-135m.source=hf:",
            ("nodes.gpus=3",): "nodes.gpus",
            ("models.m.source=hf:a/b", "models.m.decode.gpus=3"): "models.m.decode.gpus",
            ("nodes.gpus=2", "nodes.config.tp=4"): "models.m.prefill.config.tp is 4, and gpus is 2; expected 2",
            ("nodes.gpus=1", "nodes.config.device=cpu"): "models.m.prefill.config.device is cpu, and gpus is 1; expected cuda",
            ("image.repository=",): "image.repository",
            ("etcd.image.repository=",): "etcd.image.repository",
            ("router.service.http=99999",): "router.service.http",
            ("router.service.http=8001",): "router.service.http and router.service.grpc are both 8001",
            ("nodes.env[0].name=A", "nodes.env[1].name=A"): 'models.m.prefill.env has two entries with name "A"',
            ("router.volumes[0].name=a", "router.volumes[1].name=a"): 'router.volumes has two entries with name "a"',
            ("router.volumeMounts[0].name=a",): "router.volumeMounts has an entry without mountPath",
            ("nodes.podLabels.baton/model=a",): 'models.m.prefill.podLabels has "baton/model", which the chart sets',
            ("nodes.podAnnotations.checksum/config=a",): 'models.m.prefill.podAnnotations has "checksum/config", which the chart sets',
            ("modelCache.claim.size=1Gi", "modelCache.volume.emptyDir.medium=Memory"): "modelCache.volume and modelCache.claim.size are set; expected one",
            ("gpu.hostNetwork=true",): "gpu.hostNetwork is true; expected networkPolicy.enabled=false",
            ("etcd.tlsSecret=t",): "etcd.endpoints is empty",
            ("gateway.ingress.enabled=true",): "gateway.ingress.hosts is empty",
            ("gateway.httpRoute.enabled=true",): "gateway.httpRoute.parentRefs is empty",
            ("layout=stacked",): "layout",
            ("layout=grouped", "models.m.source=hf:a/b", "models.m.decode.gpus=2"): "models.m.decode.gpus is set; expected only replicas",
            ("layout=grouped", "models.m.source=hf:a/b", "models.m.decode.replicas=0"): "models.m.decode.replicas is 0; expected at least 1",
            ("layout=grouped", "nodes.autoscaling.enabled=true"): "models.m.group.autoscaling.enabled is true",
            ("nodes.autoscaling.enabled=true", "nodes.autoscaling.min=0"): "nodes.autoscaling.min",
            ("nodes.autoscaling.enabled=true", "nodes.autoscaling.min=5"): "models.m.prefill.autoscaling.min is 5; expected at most max, which is 4",
            ("router.autoscaling.enabled=true", "router.autoscaling.min=9"): "router.autoscaling.min is 9",
            ("nodes.autoscaling.enabled=true",): "models.m.prefill.autoscaling.enabled needs monitoring.prometheus",
        }
        for settings, words in cases.items():
            for program in HELMS:
                with self.subTest(settings=settings, helm=program.name):
                    run = template("--set", ",".join(settings), program=program)
                    self.assertNotEqual(run.returncode, 0)
                    # Helm 3 writes a path with dots, Helm 4 with slashes.
                    self.assertIn(words, run.stderr + run.stderr.replace("/", "."))

    def test_routes_from_outside_have_all_paths_but_metrics(self):
        found = objects("--values", EVERYTHING)
        [rule] = named(found, "Ingress", "baton-router")["spec"]["rules"]
        paths = [it["path"] for it in rule["http"]["paths"]]
        [rule] = named(found, "HTTPRoute", "baton-router-http")["spec"]["rules"]
        self.assertEqual([it["path"] for it in rule["matches"]], [{"type": "PathPrefix", "value": it} for it in paths])
        [rule] = named(found, "GRPCRoute", "baton-router-grpc")["spec"]["rules"]
        self.assertNotIn("matches", rule)
        # Prefixes match whole elements of a path.
        is_routed = lambda path: any(f"{path}/".startswith(f"{it.rstrip('/')}/") for it in paths)
        page = (CHART.parents[1] / "docs" / "api.md").read_text()
        served = {path for row in re.findall(r"^\| (`/.*?) \|", page, re.M) for path in re.findall(r"`(.*?)`", row)}
        self.assertGreater(len(served), 8)
        self.assertEqual({path for path in served if not is_routed(path)}, {"/metrics"})

    def test_a_missing_custom_resource_is_named(self):
        for setting, kind in {
            "monitoring.podMonitor.enabled": "PodMonitor",
            "monitoring.rules.enabled": "PrometheusRule",
            "gateway.httpRoute.enabled": "HTTPRoute",
            "gateway.grpcRoute.enabled": "GRPCRoute",
            "router.autoscaling.enabled=false,nodes.autoscaling.enabled": "ScaledObject",
        }.items():
            run = helm(HELMS[0], "template", "baton", CHART, *with_model("--set", f"{setting}=true"))
            self.assertNotEqual(run.returncode, 0)
            self.assertIn(f"needs the kind {kind} of {CUSTOM[kind]}, which this cluster lacks", run.stderr)


    def test_notes_name_objects_of_the_release_and_wait_for_the_port(self):
        run = helm(HELMS[1], "install", "baton", CHART, "--dry-run=client", *with_model("--set", "router.service.http=80"))
        self.assertEqual(run.returncode, 0, run.stderr)
        notes = run.stdout.partition("NOTES:")[2]
        found = objects("--set", "router.service.http=80")
        for kind, name in re.findall(r"(deployment|service)/(\S+)", notes):
            self.assertEqual(named(found, kind.capitalize(), name)["kind"], kind.capitalize())
        self.assertIn("port-forward service/baton-router 8000:80 &", notes)
        # The line before runs in the background.
        self.assertIn("curl -N --retry 9 --retry-connrefused http://127.0.0.1:8000/v1/chat/completions", notes)
        self.assertIn("helm --namespace default test baton", notes)
        self.assertIn("exec deployment/baton-router -- baton explain --slow 10", notes)
        for settings in ("router.replicas=2", "router.autoscaling.enabled=true"):
            run = helm(HELMS[1], "install", "baton", CHART, "--dry-run=client", *with_model("--set", settings))
            [loop] = [line for line in run.stdout.splitlines() if "baton explain" in line]
            [selector] = re.findall(r"--selector (\S+)", loop)
            labels = named(objects(), "Deployment", "baton-router")["spec"]["selector"]["matchLabels"]
            self.assertLessEqual(dict(label.split("=") for label in selector.split(",")).items(), labels.items())
            # The shell reads the loop.
            self.assertEqual(subprocess.run(["sh", "-n", "-c", loop]).returncode, 0)
        secrets = "router.tlsSecret=cert,router.keysSecret=keys"
        run = helm(HELMS[1], "install", "baton", CHART, "--dry-run=client", *with_model("--set", secrets))
        # The certificate does not name 127.0.0.1.
        url = "-k https://127.0.0.1:8000/v1/chat/completions"
        self.assertIn(f'{url} -H "authorization: Bearer $BATON_API_KEY"', run.stdout.partition("NOTES:")[2])

    def test_no_alias_of_vllm_is_scraped_from_routers_and_nodes(self):
        page = (CHART.parents[1] / "docs" / "metrics.md").read_text()
        router, nodes = (set(re.findall(r"^\| `(vllm:\w+)`", part, re.M)) for part in page.split("## Nodes"))
        self.assertGreater(len(router & nodes), 2)
        monitor = named(objects("--values", EVERYTHING), "PodMonitor", "baton-pods")
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            dropped = [rule for rule in endpoint.get("metricRelabelings", []) if rule["action"] == "drop"]
            # A histogram has series with suffixes.
            both = [name + end for name in router & nodes for end in (["_sum"] if name.endswith("_seconds") else [""])]
            found = [name for name in both for rule in dropped if re.fullmatch(rule["regex"], name)]
            of_router = endpoint["relabelings"][0]["regex"] == "router"
            self.assertEqual(sorted(found), [] if of_router else sorted(both))
            for name in nodes - router:
                self.assertFalse([rule for rule in dropped if re.fullmatch(rule["regex"], name)], name)

    def test_collector_has_a_pipeline_for_each_signal_of_configured_parts(self):
        config = yaml.safe_load((CHART.parents[1] / "deploy" / "collector.yaml").read_text())
        pipelines = config["service"]["pipelines"]
        self.assertEqual(set(pipelines), {"traces", "metrics", "logs"})
        for kind in ("receivers", "processors", "exporters"):
            used = {name for pipeline in pipelines.values() for name in pipeline[kind]}
            self.assertEqual(used, set(config[kind]))
        # The containers whose logs are read are those of the chart that run Baton's services.
        found = objects() + objects("--values", GROUPED)
        services = {it["containers"][0]["name"] for _, it in pod_specs(found)} - {"etcd", "check"}
        logs = {path.split("/")[5] for path in config["receivers"]["filelog"]["include"]}
        self.assertEqual(logs, services)
        # The attributes that become labels are set by the chart.
        [container] = dict(pod_specs(objects()))["baton-router"]["containers"]
        attributes = next(env["value"] for env in container["env"] if env["name"] == "OTEL_RESOURCE_ATTRIBUTES")
        for statement in config["processors"]["transform/labels"]["metric_statements"]:
            [name] = re.findall(r'resource.attributes\["([^"]+)"\]', statement)
            self.assertIn(f"{name}=", attributes)

    def test_schema_and_page_of_values_are_those_of_the_programs(self):
        root = CHART.parents[1]
        for path, options in ((CHART / "values.schema.json", []), (root / "docs" / "chart-values.md", ["--page"])):
            command = [root / "deploy" / "chart-schema.py", TOOLS / "python", PROGRAMS, *options]
            wanted = subprocess.check_output(command, text=True)
            self.assertEqual(path.read_text(), wanted, "run `make docs`")

    def test_dashboards_are_those_of_their_script(self):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.check_call([CHART.parents[1] / "deploy" / "dashboards.py", folder])
            for path in sorted(pathlib.Path(folder).iterdir()):
                committed = CHART / "files" / "dashboards" / path.name
                self.assertEqual(committed.read_text(), path.read_text(), "run `make docs`")

    def test_every_metric_has_a_panel_or_a_reason(self):
        spec = importlib.util.spec_from_file_location("dashboards", CHART.parents[1] / "deploy" / "dashboards.py")
        script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)
        page = (CHART.parents[1] / "docs" / "metrics.md").read_text()
        rows = re.findall(r"^\| `(\w+)` \| (\w+) \| .* \| (.*) \|$", page, re.M)
        metrics = {name for name, _, text in rows if "(alias of" not in text}
        self.assertGreater(len(metrics), 70)
        shown = set()
        for path in (CHART / "files" / "dashboards").iterdir():
            queries = " ".join(target["expr"] for panel in json.loads(path.read_text())["panels"] for target in panel["targets"])
            words = set(re.findall(r"(\w+)\{", queries))
            shown |= words | {re.sub("_(bucket|sum|count)$", "", word) for word in words}
        self.assertEqual(sorted(metrics - shown - script.WITHOUT_PANEL.keys()), [], "have no panel")
        self.assertEqual(sorted(script.WITHOUT_PANEL.keys() & shown), [], "have a panel, and a reason why not")
        self.assertLessEqual(script.WITHOUT_PANEL.keys(), metrics)
        self.assertTrue(all(script.WITHOUT_PANEL.values()))

    def test_rules_have_the_thresholds_and_runbooks_of_the_values(self):
        def rules(**values):
            values = {"monitoring": {"rules": {"enabled": True, **values}}}
            with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
                yaml.safe_dump(values, file)
                file.flush()
                [found] = [it for it in objects("--values", file.name) if it["kind"] == "PrometheusRule"]
            return found["spec"]["groups"][0]["rules"]

        shipped = {it["alert"]: it for it in yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"][0]["rules"]}
        of_release = 'absent(baton_draining{namespace="default", release="baton", job="baton/baton-router"})\n'
        self.assertEqual(shipped["BatonNoRouter"]["expr"], 'absent(baton_draining{job="baton/baton-router"})\n')
        shipped["BatonNoRouter"]["expr"] = of_release
        alerts = lambda found: {it["alert"]: it for it in found if "alert" in it}
        self.assertEqual({name: it["expr"].strip() for name, it in alerts(rules()).items()},
                         {name: it["expr"].strip() for name, it in shipped.items()})
        values = yaml.safe_load((CHART / "values.yaml").read_text())
        for name, number in values["monitoring"]["rules"]["thresholds"].items():
            changed = alerts(rules(thresholds={name: 0.125}))
            begin = shipped[name]["expr"].strip().removesuffix(str(number))
            self.assertNotEqual(begin, shipped[name]["expr"].strip())
            self.assertEqual(changed.pop(name)["expr"].strip(), f"{begin}0.125")
            self.assertEqual({it["expr"].strip() for it in changed.values()},
                             {it["expr"].strip() for other, it in shipped.items() if other != name})
        urls = {it["annotations"]["runbook_url"] for it in alerts(rules(runbooks="https://x/runbooks/")).values()}
        self.assertEqual(urls, {f"https://x/runbooks/{name}.md" for name in shipped})

    def test_rules_expect_the_nodes_of_the_values(self):
        def expected(*arguments):
            [found] = [it for it in objects("--set", "monitoring.rules.enabled=true", *arguments) if it["kind"] == "PrometheusRule"]
            rules = [it for it in found["spec"]["groups"][0]["rules"] if it.get("record") == "baton:nodes:expected"]
            self.assertEqual({(it["labels"]["namespace"], it["labels"]["release"]) for it in rules}, {("default", "baton")})
            return {(it["labels"]["gen_ai_request_model"], it["labels"]["role"]): it["expr"] for it in rules}

        self.assertEqual(expected("--values", EVERYTHING), {
            ("Org/Big.Model", "prefill"): "vector(2)", ("Org/Big.Model", "decode"): "vector(2)",
            ("two", "prefill"): "vector(1)", ("two", "decode"): "vector(0)",
        })
        self.assertEqual(expected("--values", GROUPED), {
            ("Org/Big.Model", "prefill"): "vector(2)", ("Org/Big.Model", "decode"): "vector(6)",
            ("two", "prefill"): "vector(0)", ("two", "decode"): "vector(1)",
        })

    def test_dashboards_follow_the_rules_of_grafanas_linter(self):
        for path in sorted((CHART / "files" / "dashboards").iterdir()):
            dashboard = json.loads(path.read_text())
            self.assertIs(dashboard["editable"], False)
            source, *variables = dashboard["templating"]["list"]
            self.assertEqual((source["name"], source["type"], source["query"]), ("datasource", "datasource", "prometheus"))
            self.assertEqual({it["refresh"] for it in variables}, {2}, "reloaded with the time range")
            for panel in dashboard["panels"]:
                with self.subTest(dashboard=path.stem, panel=panel["title"]):
                    self.assertTrue(panel["title"] and panel["targets"] and panel["fieldConfig"]["defaults"]["unit"])
                    for target in panel["targets"]:
                        query = target["expr"]
                        self.assertEqual(target["datasource"]["uid"], "${datasource}")
                        self.assertLessEqual(set(re.findall(r"\[(.*?)\]", query)), {"$__rate_interval", "1d"})
                        # A counter is only meaningful as a rate.
                        for function, name in re.findall(r"(\w*)\(?\b(\w+_(?:total|sum|count|bucket))\{", query):
                            if name != "process_open_file_descriptor_count":
                                self.assertEqual(function, "rate", query)
                        for labels in re.findall(r"\w\{(.*?)\}", query):
                            for name in ("namespace", "release"):
                                self.assertIn(f'{name}=~"${name}"', labels)

    def test_every_alert_fires_and_is_silent_as_its_tests_say(self):
        with tempfile.TemporaryDirectory() as folder:
            for path in (CHART / "files" / "alerts.yaml", HERE / "chart" / "alerts.test.yaml"):
                shutil.copy(path, folder)
            run = subprocess.run(
                [PROMTOOL, "test", "rules", f"{folder}/alerts.test.yaml"], capture_output=True, text=True
            )
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
        rules = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"][0]["rules"]
        tests = {test["name"] for test in yaml.safe_load((HERE / "chart" / "alerts.test.yaml").read_text())["tests"]}
        names = {rule["alert"] for rule in rules}
        self.assertEqual(tests, {f"{name} {end}" for name in names for end in ("fires", "is silent")})
        pages = {page.stem for page in (CHART.parents[1] / "docs" / "runbooks").glob("Baton*.md")}
        self.assertEqual(pages, names)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
