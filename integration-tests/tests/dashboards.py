"""Runs the queries of all panels of the chart's dashboards, and those that scale pools, against a Prometheus that scrapes a
`baton up`. Also asks for every metric, label and label value that panels and alerts select.

Arguments: folder of the tools, folder of Baton's programs, URL of etcd, path of a model.
"""

import hashlib
import itertools
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

if __name__ == "__main__":
    TOOLS, PROGRAMS, MODEL = (pathlib.Path(sys.argv[index]) for index in (1, 2, 4))
    ETCD = sys.argv[3]
    sys.path.insert(0, str(TOOLS / "python"))

import yaml  # noqa: E402

CHART = pathlib.Path(__file__).parents[2] / "helm" / "baton"
DASHBOARDS = CHART / "files" / "dashboards"
ALERTS = CHART / "files" / "alerts.yaml"
DEADLINE = 240
# The client's API key.
KEY = "key"


def free_address():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


def panels(interval, variables):
    """Yields the title and the query of each panel, with Grafana's variables replaced."""
    for path in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                # A healthy cluster has no alerts.
                if "ALERTS" in target["expr"]:
                    continue
                query = target["expr"].replace("$__rate_interval", interval)
                query = re.sub(r"\$(namespace|release|model)", lambda name: variables[name[1]], query)
                name = f"{path.stem}, {panel['title']}"
                # A 0 for missing data would hide a wrong name.
                yield name, query.replace(" or on() vector(0)", "")
                yield from ((name, it) for it in selected(query))


def alerts():
    """Yields the name of each alert with a query for everything that the alert selects. A healthy cluster has no data for the
    alert's own query."""
    for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]:
        yield from ((rule["alert"], it) for it in selected(rule["expr"]))


def selected(query):
    """Yields a query for each label value that a query selects or excludes, and for each label by which it groups."""
    grouped = {label for labels in re.findall(r"\bby \((.*?)\)", query) for label in re.findall(r"\w+", labels)}
    found = re.findall(r"\b((?:baton|gen_ai|process)_\w+|up)\b(?:\{(.*?)\})?", re.sub(r"\b(?:by|without) \(.*?\)", "", query))
    assert found, query
    for metric, matchers in found:
        yield from (f'{metric}{{{label}!=""}}' for label in grouped)
        for label, operator, values in re.findall(r'(\w+)(=~|!~|!=|=)"(.*?)"', matchers):
            if values == "":
                yield f'{metric}{{{label}!=""}}'
            elif re.fullmatch(r"[\w|]+", values):
                yield from (f'{metric}{{{label}="{value}"}}' for value in values.split("|"))
            else:
                yield f'{metric}{{{label}{operator.replace("!", "=")}"{values}"}}'


def scaling(helm, model):
    """Yields the queries of KEDA's triggers."""
    command = [helm, "template", "baton", CHART, "--api-versions", "keda.sh/v1alpha1/ScaledObject"]
    values = {
        "existingSecret": "s",
        "nodes": {"autoscaling": {"enabled": True}},
        "monitoring": {"prometheus": "http://prometheus:9090"},
        "models": {"m": {"name": model, "source": "hf:a/b"}},
    }
    rendered = subprocess.run([*command, "--values", "-"], input=json.dumps(values), text=True, check=True, capture_output=True)
    for it in yaml.safe_load_all(rendered.stdout):
        if it and it["kind"] == "ScaledObject":
            for trigger in it["spec"]["triggers"]:
                # A 0 for missing data would hide a wrong name.
                yield it["metadata"]["name"], trigger["metadata"]["query"].replace(" or vector(0)", "")


def ask(address, query):
    url = f"http://{address}/api/v1/query?query={urllib.parse.quote(query)}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)["data"]["result"]


def has_number(result):
    return any(value not in ("NaN", "+Inf", "-Inf") for value in (sample["value"][1] for sample in result))


def without_data(queries, address, baton, router, admin=None):
    """Sends requests until all queries have data in the Prometheus at the address. Returns the queries without data."""
    load = [baton, "bench", "serve", "--url", f"http://{router}", "--requests", "8", "--warmup", "0"]
    # The rate of KV is measured from 1 MiB on.
    load += ["--input-tokens", "512", "--output-tokens", "8", "--concurrency", "4"]
    push = [baton, "weights", "push", MODEL, "--to", f"http://{admin}"]
    quiet = {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    wanted = dict(enumerate(queries))
    assert len(wanted) > 200, wanted
    deadline = time.monotonic() + DEADLINE
    # A rate needs two samples with requests between them.
    for seed in itertools.count():
        if not wanted or time.monotonic() > deadline:
            return list(wanted.values())
        # Send different prompts each time: a decode node would prefill a mostly cached prompt itself.
        subprocess.run([*load, "--seed", str(seed)], env=os.environ | {"BATON_API_KEY": KEY}, **quiet)
        ask_router(router, "/v1/completions", {"prompt": "Yes or no?", "max_tokens": 4, "regex": "yes|no"})
        # Several updates, for the same reason: all that end between two scrapes count as one sample.
        if admin and seed % 2 == 0 and seed < 8:
            subprocess.run(push, **quiet)
        try:
            wanted = {index: it for index, it in wanted.items() if not has_number(ask(address, it[1]))}
        except OSError:
            # Prometheus is starting.
            time.sleep(0.2)


def ask_router(router, path, body=None):
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    request = urllib.request.Request(f"http://{router}{path}", json.dumps(body).encode() if body else None, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def start_cluster(folder, router, admin):
    """Starts `baton up` and returns the process and the addresses of the metrics by job."""
    log = folder / "up.log"
    command = [PROGRAMS / "baton", "up", "--model", MODEL, "--http", router, "--grpc", "127.0.0.1:0"]
    # Unlike router.http, this address shows all metrics without a key.
    metrics = free_address()
    keys = folder / "keys.toml"
    keys.write_text(f'[[key]]\nname = "key"\nsha256 = "{hashlib.sha256(KEY.encode()).hexdigest()}"\n')
    # With etcd, so that routers and nodes report whether it answers.
    command += ["--etcd", ETCD]
    env = os.environ | {
        # Otherwise an idle decode node may prefill the short prompts itself.
        "BATON_ROUTER_DISAGGREGATE": "always",
        "BATON_ROUTER_ADMIN": admin,
        "BATON_ROUTER_METRICS": metrics,
        "BATON_ROUTER_KEYS": str(keys),
        "BATON_NODE_SPECULATE": "ngram",
        "BATON_TIER_DISK_PATH": str(folder / "tier"),
        "BATON_TIER_DISK_SIZE": "16MiB",
        # So that requests wait in the router.
        "BATON_NODE_SLOTS": "1",
        "BATON_NODE_WAITING_MAX": "0",
    }
    up = subprocess.Popen(command, env=env, stdout=log.open("w"), stderr=subprocess.STDOUT)
    deadline = time.monotonic() + DEADLINE
    while "baton: ready" not in log.read_text():
        if up.poll() is not None or time.monotonic() > deadline:
            up.kill()
            sys.exit(f"baton up is not ready:\n{log.read_text()}")
        time.sleep(0.1)
    text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text())
    nodes = re.findall(r"(prefill|decode) node is ready.* metrics=([0-9.:]+)", text)
    return up, {"router": metrics, **{f"{role}-node": address for role, address in nodes}}


def main(folder):
    router, admin, address = free_address(), free_address(), free_address()
    up, jobs = start_cluster(folder, router, admin)
    running = [up]
    try:
        scrapes = [
            {
                "job_name": f"baton/baton-{job}",
                "static_configs": [{"targets": [target], "labels": {"namespace": "default", "release": "baton"}}],
            }
            for job, target in jobs.items()
        ]
        config = folder / "prometheus.yml"
        # Prometheus reads YAML, and JSON is valid YAML.
        config.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": scrapes}))
        program = shutil.which("prometheus") or TOOLS / "debian/usr/bin/prometheus"
        prometheus = subprocess.Popen(
            [program, f"--config.file={config}", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"],
            stderr=(folder / "prometheus.log").open("w"),
        )
        running.append(prometheus)
        model = ask_router(router, "/v1/models")["data"][0]["id"]
        # As Grafana replaces them for "All" and a scrape interval of one second.
        everything = dict.fromkeys(("namespace", "release", "model"), ".*")
        queries = [*panels("30s", everything), *scaling(TOOLS / "helm3", model), *alerts()]
        if missing := without_data(queries, address, PROGRAMS / "baton", router, admin):
            sys.exit("no data in:\n" + "\n".join(f"{name}: {query}" for name, query in missing))
        print(f"{len(queries)} queries have data")
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(30)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(pathlib.Path(temporary))
