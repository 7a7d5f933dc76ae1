#!/usr/bin/env python3
"""Prints values.schema.json of the Helm chart, or with --page docs/chart-values.md, from values.yaml and from the settings that the
programs print.

Names, types and descriptions of the values are those of values.yaml and its comments. Arguments: folder of the Python packages
that deploy/chart-tools.sh installs, folder of Baton's programs.
"""

import json
import pathlib
import re
import subprocess
import sys

PACKAGES, PROGRAMS = map(pathlib.Path, sys.argv[1:3])
sys.path.insert(0, str(PACKAGES))
import yaml  # noqa: E402

VALUES = pathlib.Path(__file__).parents[1] / "helm" / "baton" / "values.yaml"

# The section of the settings in each `config`, and the settings that the chart itself sets.
SECTIONS = {
    "modelDefaults.config": ("model", "path name dtype"),
    "nodes.config": ("node", "id grpc metrics"),
    "router.config": ("router", "http grpc metrics admin keys admin_keys tls_cert tls_key models chat_templates tool_formats reasoning_formats"),
    "etcd.config": (
        "cluster",
        "prefill decode etcd etcd_user etcd_password etcd_ca etcd_cert etcd_key secret secret_file tls_cert tls_key tls_ca tls_name",
    ),
    "nodes.tier.config": ("tier", "disk_path"),
    "transfer.config": ("transfer", "control data advertise"),
    "weights.config": ("weights", ""),
    "telemetry.config": ("telemetry", "instance"),
}
# Parts of Kubernetes' own objects, which the API server checks.
OBJECTS = ("resources", "affinity", "nodeSelector", "labels", "podLabels", "annotations", "podAnnotations", "volume", "podSecurityContext", "securityContext")
STRINGS = ("hosts", "hostnames", "endpoints", "accessModes")
FRACTIONS = ("waitSeconds", "busy", "kvUsage")
# Not 0: no metric of a pool without nodes would tell that the pool is needed.
POSITIVE = ("min", "max", "count")
PORTS = ("http", "grpc")
CHOICES = {"layout": ["separate", "grouped"], "nodes.gpus": [0, 1, 2, 4, 8]}
# A pool has the values of `nodes`.
POOLS = ("modelDefaults.prefill", "modelDefaults.decode", "modelDefaults.group")
# An object of extraObjects may be a string with a template.
EITHER = ("extraObjects",)


def settings():
    """The JSON Schema of each section of settings."""
    schemas = (
        subprocess.check_output([PROGRAMS / program, "--config-schema"])
        for program in ("baton-router", "baton-decode-node")
    )
    return {name: it for schema in schemas for name, it in json.loads(schema)["properties"].items()}


def comments():
    """The comment above each key of values.yaml, by path."""
    found, comment, path = {}, [], []
    for line in VALUES.read_text().splitlines():
        words = re.match(r"( *)(- )?(?:# (.*)|([A-Za-z]+):.*)?$", line)
        if words is None or not line.strip():
            comment = []
            continue
        if words[3]:
            comment.append(words[3])
            continue
        # Keys of a list's items are indented by the dash too.
        indent = len(words[1]) + len(words[2] or "")
        path = [it for it in path if it[0] < indent] + [(indent, words[4])]
        found[".".join(key for _, key in path)] = " ".join(comment)
        comment = []
    return found


PROGRAM_SETTINGS, COMMENTS = settings(), comments()


def closed(properties, **more):
    return {"type": "object", "additionalProperties": False, "properties": properties, **more}


def of_value(path, value):
    """The schema of a value, from its default."""
    key = path.rpartition(".")[2]
    if path in SECTIONS:
        section, own = SECTIONS[path]
        properties = PROGRAM_SETTINGS[section]["properties"]
        return closed({name: it for name, it in properties.items() if name not in own.split()})
    if path == "models":
        model = {"$ref": "#/properties/modelDefaults"}
        return {"type": "object", "propertyNames": {"pattern": "^[a-z0-9]([a-z0-9-]{0,28}[a-z0-9])?$"}, "additionalProperties": model}
    if path in POOLS:
        return {"$ref": "#/properties/nodes"}
    if path == "modelDefaults.dtype":
        return {"enum": PROGRAM_SETTINGS["model"]["properties"]["dtype"]["enum"]}
    if path in CHOICES:
        return {"enum": CHOICES[path]}
    if key in OBJECTS:
        return {"type": "object"}
    if isinstance(value, dict):
        return closed({name: described(f"{path}.{name}", it) for name, it in value.items()})
    if isinstance(value, list):
        items = "string" if key in STRINGS else ["object", "string"] if key in EITHER else "object"
        return {"type": "array", "items": {"type": items}}
    if isinstance(value, bool):
        return {"type": "boolean"}
    if key in FRACTIONS or path.startswith("monitoring.rules.thresholds."):
        return {"type": "number", "exclusiveMinimum": 0}
    if key in PORTS:
        return {"type": "integer", "minimum": 1, "maximum": 65535}
    if path == "loadSeconds":
        return {"type": "integer", "minimum": 10, "maximum": 3600}
    if isinstance(value, int):
        return {"type": "integer", "minimum": int(key in POSITIVE)}
    if value is None:
        return {"type": ["integer", "null"], "minimum": 0}
    if path.endswith("image.repository"):
        return {"type": "string", "minLength": 1}
    return {"type": "string"}


def described(path, value):
    schema = of_value(path, value)
    comment = COMMENTS.get(path)
    return schema | ({"description": comment} if comment else {})


values = yaml.safe_load(VALUES.read_text())
schema = closed({name: described(name, value) for name, value in values.items()})
# Charts that include this chart as a dependency may set `global`.
schema["properties"]["global"] = {"type": "object"}


def allowed(path, schema):
    """What a value may be, in words."""
    if path in SECTIONS:
        return f"settings of [`[{SECTIONS[path][0]}]`](configuration.md)"
    if path == "models.KEY":
        return "as `modelDefaults`"
    if "$ref" in schema:
        return "as `nodes`"
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    [kind] = {*schema["type"]} - {"null"} if isinstance(schema["type"], list) else [schema["type"]]
    words = {"boolean": "true or false", "object": "a Kubernetes object", "array": "a list", "integer": "a whole number"}
    return words.get(kind, f"a {kind}")


def rows(path, schema, default):
    """The table's rows of a value and of the values in it."""
    text = schema.get("description", "")
    if path == "models":
        path = "models.KEY"
    inner = {} if path in SECTIONS else schema.get("properties", {})
    if text or not inner:
        shown = "" if inner or default in ("", None, [], {}) else f"`{json.dumps(default)}`"
        yield f"| `{path}` | {shown} | {'' if inner else allowed(path, schema)} | {text} |"
    for name, it in inner.items():
        yield from rows(f"{path}.{name}", it, default[name])


def page():
    del schema["properties"]["global"]
    yield "# Values of the Helm chart"
    yield ""
    yield "`make docs` writes this page. [helm/README.md](../helm/README.md) explains the chart. An empty default is the empty text, list or"
    yield "object, or null."
    yield ""
    yield "| value | default | allowed | meaning |"
    yield "| --- | --- | --- | --- |"
    for name, it in schema["properties"].items():
        yield from rows(name, it, values[name])


if "--page" in sys.argv:
    print("\n".join(page()))
else:
    print(json.dumps({"$schema": "http://json-schema.org/draft-07/schema#"} | schema, indent=1))
