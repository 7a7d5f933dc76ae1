#!/usr/bin/env python3
"""Runs a command in a real Kubernetes cluster of one node that exists only for that command.

    cluster.py [COMMAND...]     (default: a shell)

The cluster has its own network, process and mount namespaces and its own cgroup root. Its first process runs this file again.
When that process ends, the kernel ends all processes and mounts of the cluster. This file then removes the cgroups. The logs stay
in target/k8s/logs. The node has the images that `make image` packed.
"""

import fcntl
import hashlib
import io
import json
import os
import pathlib
import secrets
import shutil
import signal
import subprocess
import sys
import tarfile
import time

HERE = pathlib.Path(__file__).resolve().parent
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", HERE.parent.parent / "target")).resolve()
TOOLS = TARGET / "k8s"
STATE = TOOLS / "state"
LOGS = TOOLS / "logs"
CGROUP = "baton-k8s"
NODE = "10.244.0.1"  # the node's address, and the gateway of the pods behind it
PODS = "10.244.0.0/16"
SERVICES = "10.96.0.0/16"
API = f"https://{NODE}:6443"
PROMETHEUS = "127.0.0.1:9090"
PAUSE = "baton.test/pause:1"
START_SECONDS = 120


def archive(path, name, entrypoint, files):
    """Writes an image with one layer of the given files (path in the image: path on this machine)."""

    def tar(members):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as layer:
            for member, data, mode in members:
                entry = tarfile.TarInfo(member)
                entry.size, entry.mode = len(data), mode
                layer.addfile(entry, io.BytesIO(data))
        return buffer.getvalue()

    layer = tar((inside, pathlib.Path(source).read_bytes(), 0o755) for inside, source in files.items())
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": entrypoint, "User": "65532"},
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(layer).hexdigest()]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    parts = [("config.json", json.dumps(config).encode()), ("manifest.json", json.dumps(manifest).encode())]
    path.write_bytes(tar((name, data, 0o644) for name, data in [*parts, ("layer.tar", layer)]))


def image_name(path):
    """Returns the name of the image in an OCI archive."""
    with tarfile.open(path) as image:
        index = json.load(image.extractfile("index.json"))
    return index["manifests"][0]["annotations"]["org.opencontainers.image.ref.name"]


class Components:
    """The cluster's processes, each with its log file."""

    def __init__(self):
        self.running = {}

    def start(self, name, *command):
        log = open(LOGS / f"{name}.log", "w")
        self.running[name] = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                                              start_new_session=True)

    def check(self):
        for name, process in self.running.items():
            if process.poll() is not None:
                tail = (LOGS / f"{name}.log").read_text(errors="replace").splitlines()[-15:]
                raise SystemExit(f"{name} exited with {process.returncode}:\n" + "\n".join(tail))

    def wait_for(self, *command):
        """Repeats a command until it succeeds."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            self.check()
            result = subprocess.run(list(map(str, command)), capture_output=True, text=True)
            if result.returncode == 0:
                return
            if time.monotonic() > deadline:
                raise SystemExit(f"no success within {START_SECONDS} s: {' '.join(map(str, command))}: {result.stderr}")
            time.sleep(0.2)


def run(*command):
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)


def write(name, content):
    path = STATE / name
    path.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))
    return path


def isolate():
    """Gives the cluster its own mounts and network inside the new namespaces."""
    run("mount", "--make-rshared", "/")
    (STATE / "var").mkdir()
    run("mount", "--bind", STATE / "var", "/var/lib")
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    run("mount", "-t", "tmpfs", "tmpfs", "/var/log")
    # The command finds Services by name, as pods do.
    names = pathlib.Path("/etc/resolv.conf").resolve()
    names.parent.mkdir(parents=True, exist_ok=True)
    names.touch()
    run("mount", "--bind", write("resolv.conf", f"nameserver {NODE}\nsearch svc.cluster.local\n"), names)
    # The kubelet sets these kernel settings for the whole machine unless they already have the values it wants.
    wanted = {"vm/overcommit_memory": 1, "vm/panic_on_oom": 0, "kernel/panic": 10, "kernel/panic_on_oops": 1,
              "kernel/keys/root_maxkeys": 1000000, "kernel/keys/root_maxbytes": 25000000}
    for name, value in wanted.items():
        run("mount", "--bind", write(name.replace("/", "."), f"{value}\n"), f"/proc/sys/{name}")

    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "cni0", "type", "bridge")
    run("ip", "address", "add", f"{NODE}/16", "dev", "cni0")
    run("ip", "link", "set", "cni0", "up")
    # Packets to Service addresses need a route before kube-proxy's rules rewrite their addresses.
    run("ip", "route", "add", "default", "dev", "cni0")
    pathlib.Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def credentials():
    """Writes the certificate of the API server and a kubeconfig with a token of the administrators' group."""
    certificate, key, token = STATE / "api.crt", STATE / "api.key", secrets.token_hex(16)
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "30",
         "-subj", "/CN=kubernetes", "-addext", f"subjectAltName=IP:{NODE},IP:10.96.0.1,DNS:kubernetes.default.svc",
         "-keyout", key, "-out", certificate], check=True, capture_output=True)
    write("tokens.csv", f"{token},admin,admin,system:masters\n")
    return write("kubeconfig", {
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": API, "certificate-authority": str(certificate)}}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
    })


def start_control_plane(components, kubeconfig):
    components.start("etcd", "etcd", "--data-dir", STATE / "etcd", "--listen-client-urls", "http://127.0.0.1:2379",
                     "--advertise-client-urls", "http://127.0.0.1:2379", "--listen-peer-urls", "http://127.0.0.1:2380")
    components.start(
        "kube-apiserver", "kubernetes", "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379",
        f"--service-cluster-ip-range={SERVICES}", f"--advertise-address={NODE}", "--allow-privileged",
        "--kubelet-preferred-address-types=InternalIP",
        "--authorization-mode=RBAC", f"--token-auth-file={STATE}/tokens.csv",
        f"--tls-cert-file={STATE}/api.crt", f"--tls-private-key-file={STATE}/api.key",
        "--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={STATE}/api.crt",
        f"--service-account-signing-key-file={STATE}/api.key")
    components.wait_for("kubectl", "get", "--raw", "/readyz")
    for name, flags in {
        "kube-controller-manager": [f"--service-account-private-key-file={STATE}/api.key",
                                    f"--root-ca-file={STATE}/api.crt", f"--flex-volume-plugin-dir={STATE}/volumes"],
        "kube-scheduler": [],
    }.items():
        components.start(name, "kubernetes", name, f"--kubeconfig={kubeconfig}", "--leader-elect=false",
                         f"--authentication-kubeconfig={kubeconfig}", f"--authorization-kubeconfig={kubeconfig}", *flags)


def start_collector(components):
    """Starts an OpenTelemetry Collector with deploy/collector.yaml. The backends are a Prometheus and files in logs."""
    components.start("prometheus", "prometheus", f"--config.file={write('prometheus.json', {})}", "--web.enable-otlp-receiver",
                     f"--storage.tsdb.path={STATE}/prometheus", f"--web.listen-address={PROMETHEUS}")
    files = {f"file/{signal}": {"path": str(LOGS / f"{signal}.json"), "flush_interval": "200ms"} for signal in ("traces", "logs")}
    backends = write("collector.json", {
        "exporters": {**files, "otlphttp/metrics": {"metrics_endpoint": f"http://{PROMETHEUS}/api/v1/otlp/v1/metrics"}},
        "service": {"telemetry": {"metrics": {"level": "none"}},
                    "pipelines": {"traces": {"exporters": ["file/traces"]}, "logs": {"exporters": ["file/logs"]}}},
    })
    components.start("collector", "collector", f"--config={HERE.parent / 'collector.yaml'}", f"--config={backends}")


def start_kwok(components, kubeconfig):
    """Starts the controller that plays the kubelet of nodes with its annotation."""
    components.start("kwok", "kwok", f"--kubeconfig={kubeconfig}", "--manage-all-nodes=false",
                     "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake")


def start_node(components, kubeconfig):
    (STATE / "cni").mkdir()
    write("cni/10-bridge.conflist", {
        "cniVersion": "1.0.0", "name": "pods",
        "plugins": [{
            "type": "bridge", "bridge": "cni0", "isGateway": True, "hairpinMode": True,
            "ipam": {"type": "host-local", "ranges": [[{"subnet": PODS, "gateway": NODE}]], "routes": [{"dst": "0.0.0.0/0"}]},
        }],
    })
    # Without CAP_SYS_RESOURCE, as in many sandboxes, containerd may not lower a container's OOM score.
    containerd = write("containerd.toml", f"""
version = 2
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE}"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{TOOLS}/debian/usr/lib/cni"
conf_dir = "{STATE}/cni"
""")
    components.start("containerd", "containerd", "--config", containerd)
    components.wait_for("ctr", "version")
    archive(STATE / "pause.tar", PAUSE, ["/pause"], {"pause": TOOLS / "bin/pause"})
    for image in [STATE / "pause.tar", *sorted(TARGET.glob("image/*.tar"))]:
        run("ctr", "--namespace", "k8s.io", "images", "import", image)
        # The kubelet looks for a name without a registry under this prefix.
        if not image.is_relative_to(STATE):
            run("ctr", "--namespace", "k8s.io", "images", "tag", name := image_name(image), f"docker.io/library/{name}")

    kubelet = write("kubelet.json", {
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "cgroupDriver": "cgroupfs", "cgroupRoot": f"/{CGROUP}", "failSwapOn": False,
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "clusterDNS": [NODE], "clusterDomain": "cluster.local", "resolvConf": "",
        # The cluster shares the machine's disk, which may be fuller than the kubelet's defaults allow.
        "evictionHard": {"nodefs.available": "1Gi"}, "imageGCHighThresholdPercent": 100,
        "volumePluginDir": f"{STATE}/volumes",
    })
    components.start("kubelet", "kubernetes", "kubelet", f"--config={kubelet}", f"--kubeconfig={kubeconfig}",
                     "--hostname-override=node", f"--node-ip={NODE}")
    proxy = write("kube-proxy.json", {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "mode": "nftables",
        "clientConnection": {"kubeconfig": str(kubeconfig)}, "clusterCIDR": PODS, "hostnameOverride": "node",
        # kube-proxy must not change the conntrack settings, which apply to the whole machine.
        "conntrack": {"maxPerCore": 0},
    })
    components.start("kube-proxy", "kubernetes", "kube-proxy", f"--config={proxy}")
    corefile = write("Corefile", f"""
cluster.local 10.in-addr.arpa {{
    bind {NODE}
    errors
    kubernetes cluster.local 10.in-addr.arpa {{
        kubeconfig {kubeconfig}
        ttl 5
    }}
}}
""")
    components.start("coredns", "coredns", "-conf", corefile)
    components.wait_for("kubectl", "wait", "--for=condition=Ready", "node/node", "--timeout=1s")


def inside(command):
    """Starts the cluster in the new namespaces and runs the command in it. Returns the command's exit status."""
    isolate()
    kubeconfig = credentials()
    os.environ["KUBECONFIG"] = str(kubeconfig)
    components = Components()
    start_control_plane(components, kubeconfig)
    start_node(components, kubeconfig)
    start_collector(components)
    start_kwok(components, kubeconfig)
    process = subprocess.Popen(command)
    while process.poll() is None:
        components.check()
        time.sleep(0.5)
    return process.returncode


def cgroups():
    """Returns the cluster's cgroup in every hierarchy: one in cgroup v2, one for each controller in v1."""
    root = pathlib.Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        return [root / CGROUP]
    return [path / CGROUP for path in root.iterdir() if (path / "cgroup.procs").exists() and not path.is_symlink()]


def set_cpu_share(path, times):
    """Sets a cgroup's share of the CPUs to a multiple of the default (of cgroup v1, of v2)."""
    for setting, default in (("cpu.shares", 1024), ("cpu.weight", 100)):
        if (path / setting).exists():
            (path / setting).write_text(str(default * times))


def join_cgroup():
    """Moves this process to the cluster's components."""
    for path in cgroups():
        if (path / "components/cpu.shares").exists() or (path / "components/cpu.weight").exists():
            (path / "components/cgroup.procs").write_text("0")


def remove_cgroups():
    """Removes the cluster's cgroups. The kernel refuses until their last process has ended."""
    deadline = time.monotonic() + 10
    folders = [folder for top in cgroups() for folder, _, _ in os.walk(top, topdown=False)]
    while folders:
        try:
            os.rmdir(folders[0])
            folders.pop(0)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def outside(command):
    """Runs this file in new namespaces and removes what the cluster leaves. Returns the command's exit status."""
    if os.geteuid() != 0:
        raise SystemExit("cannot start a cluster: not root; expected root, for namespaces, mounts and cgroups")
    TOOLS.mkdir(parents=True, exist_ok=True)
    lock = open("/run/lock/baton-k8s", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit("cannot start a cluster: another one runs on this machine; expected one at a time") from None

    def clean():
        remove_cgroups()
        shutil.rmtree(STATE, ignore_errors=True)

    clean()
    STATE.mkdir()
    LOGS.mkdir(exist_ok=True)
    for path in cgroups():
        path.mkdir()
        for setting in ("cpuset.cpus", "cpuset.mems"):
            if (path / setting).exists():
                (path / setting).write_text((path.parent / setting).read_text())
        if (path / "cgroup.controllers").exists():
            controllers = (path / "cgroup.controllers").read_text().split()
            (path / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in controllers))
        # The cluster's cgroup competes with single processes of the machine, each of which has the default share.
        set_cpu_share(path, 16)
        # The components compete with the pods and must not starve under load.
        (path / "components").mkdir()
        set_cpu_share(path / "components", 4)
    programs = [TOOLS / "bin", TOOLS / "debian/usr/bin", TOOLS / "debian/usr/sbin"]
    environment = {**os.environ, "PATH": ":".join(map(str, [*programs, os.environ["PATH"], "/usr/sbin", "/sbin"]))}
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--propagation", "private", "--net", "--pid", "--fork",
         "--kill-child", "--mount-proc", sys.executable, os.path.abspath(__file__), "--inside", *command], env=environment,
        preexec_fn=join_cgroup)
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        return process.wait()
    finally:
        process.kill()
        process.wait()
        clean()


if __name__ == "__main__":
    # Ignore Ctrl-C here: only the command handles it, and does not inherit this handler.
    signal.signal(signal.SIGINT, lambda *_: None)
    arguments = sys.argv[1:]
    if arguments[:1] == ["--inside"]:
        sys.exit(inside(arguments[1:]))
    sys.exit(outside(arguments or [os.environ.get("SHELL", "/bin/bash")]))
