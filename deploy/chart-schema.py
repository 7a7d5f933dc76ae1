#!/usr/bin/env python3
"""Prints values.schema.json of the Helm chart, from values.yaml and from the settings that the programs print.

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
    "models[].config": ("model", "path name dtype"),
    "nodes.config": ("node", "id grpc metrics"),
    "router.config": ("router", "http grpc metrics admin models chat_templates tool_formats"),
    "etcd.config": (
        "cluster",
        "prefill decode etcd etcd_user etcd_password etcd_ca etcd_cert etcd_key secret secret_file",
    ),
    "transfer.config": ("transfer", "control data advertise"),
    "telemetry.config": ("telemetry", "instance"),
}
# Parts of Kubernetes' own objects, which the API server checks.
OBJECTS = ("resources", "affinity", "nodeSelector", "labels", "podLabels", "annotations", "podAnnotations", "volume")
STRINGS = ("hosts", "hostnames", "endpoints")
FRACTIONS = ("pendingSeconds", "kvUsage")
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
        # A key after "- " is one level deeper than its indentation.
        depth = (len(words[1]) + len(words[2] or "")) // 2
        path[depth:] = [words[4]]
        found[".".join(path)] = " ".join(comment)
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
        return {"type": "array", "minItems": 1, "items": model(value[0])}
    if key in OBJECTS:
        return {"type": "object"}
    if isinstance(value, dict):
        return closed({name: described(f"{path}.{name}", it) for name, it in value.items()})
    if isinstance(value, list):
        items = "string" if key in STRINGS else ["object", "string"] if key in EITHER else "object"
        return {"type": "array", "items": {"type": items}}
    if isinstance(value, bool):
        return {"type": "boolean"}
    if key in FRACTIONS:
        return {"type": "number", "exclusiveMinimum": 0}
    if isinstance(value, int):
        return {"type": "integer", "minimum": 0}
    if value is None:
        return {"type": ["integer", "null"], "minimum": 0}
    return {"type": "string"}


def model(first):
    """The schema of one model: a pool has the values of `nodes`."""
    properties = {name: described(f"models[].{name}", it) for name, it in first.items()}
    properties["name"]["minLength"] = properties["source"]["minLength"] = 1
    properties["dtype"]["enum"] = PROGRAM_SETTINGS["model"]["properties"]["dtype"]["enum"]
    for role in ("prefill", "decode"):
        properties[role] = {"$ref": "#/properties/nodes"}
    return closed(properties, required=["name", "source"])


def described(path, value):
    schema = of_value(path, value)
    comment = COMMENTS.get(path.replace("[]", ""))
    return schema | ({"description": comment} if comment else {})


values = yaml.safe_load(VALUES.read_text())
schema = closed({name: described(name, value) for name, value in values.items()})
# Charts that include this chart as a dependency may set `global`.
schema["properties"]["global"] = {"type": "object"}
print(json.dumps({"$schema": "http://json-schema.org/draft-07/schema#"} | schema, indent=1))
