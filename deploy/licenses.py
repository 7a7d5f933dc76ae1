#!/usr/bin/env python3
"""Prints the licenses of Baton's Rust dependencies, each text once, below the names of its packages.

With the argument `spdx` prints the dependencies as a bill of materials in SPDX 2.3 (JSON), with the checksums of Cargo.lock.
"""

import datetime
import json
import os
import pathlib
import subprocess
import sys
import tomllib
import uuid

BINARIES = ["baton", "router", "prefill-node", "decode-node"]
NAMES = ("LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE")

metadata = json.loads(
    subprocess.check_output(
        [os.environ.get("CARGO", "cargo"), "metadata", "--locked", "--format-version", "1"]
        + ["--filter-platform", "x86_64-unknown-linux-gnu"],
    )
)
packages = {package["id"]: package for package in metadata["packages"]}
nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}

reached = set()
pending = [id for id, package in packages.items() if package["name"] in BINARIES and not package["source"]]
while pending:
    id = pending.pop()
    if id not in reached:
        reached.add(id)
        pending += [
            dependency["pkg"]
            for dependency in nodes[id]["deps"]
            if any(kind["kind"] != "dev" for kind in dependency["dep_kinds"])
        ]

def spdx():
    """Returns the bill of materials of the binaries. Equal commits have equal documents."""
    lock = tomllib.loads(pathlib.Path("Cargo.lock").read_text())
    checksums = {(it["name"], it["version"]): it.get("checksum") for it in lock["package"]}
    commit, seconds = subprocess.check_output(["git", "log", "-1", "--format=%H %ct"], text=True).split()
    created = datetime.datetime.fromtimestamp(int(seconds), datetime.timezone.utc)
    ids = {id: f"SPDXRef-{index}" for index, id in enumerate(sorted(reached))}
    listed = []
    for id, own in ids.items():
        package = packages[id]
        name, version = package["name"], package["version"]
        entry = {
            "SPDXID": own,
            "name": name,
            "versionInfo": version,
            "downloadLocation": "NOASSERTION",
            "filesAnalyzed": False,
            # Cargo once allowed "/" for "OR".
            "licenseDeclared": (package["license"] or "NOASSERTION").replace("/", " OR "),
        }
        if package["source"]:
            purl = {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl"}
            entry["externalRefs"] = [purl | {"referenceLocator": f"pkg:cargo/{name}@{version}"}]
        if checksum := checksums[name, version]:
            entry["checksums"] = [{"algorithm": "SHA256", "checksumValue": checksum}]
        listed.append(entry)
    relation = lambda left, kind, right: {"spdxElementId": left, "relationshipType": kind, "relatedSpdxElement": right}
    described = [ids[id] for id in ids if packages[id]["name"] in BINARIES and not packages[id]["source"]]
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": "baton",
        "documentNamespace": uuid.uuid5(uuid.NAMESPACE_OID, commit).urn,
        "creationInfo": {"created": f"{created:%Y-%m-%dT%H:%M:%SZ}", "creators": ["Tool: deploy/licenses.py"]},
        "packages": listed,
        "relationships": [
            *(relation("SPDXRef-DOCUMENT", "DESCRIBES", id) for id in described),
            *(
                relation(own, "DEPENDS_ON", ids[dependency["pkg"]])
                for id, own in ids.items()
                for dependency in nodes[id]["deps"]
                if dependency["pkg"] in ids
            ),
        ],
    }


if sys.argv[1:] == ["spdx"]:
    json.dump(spdx(), sys.stdout, indent=1)
    sys.exit()

texts = {}
for id in reached:
    package = packages[id]
    if package["source"] is None:
        continue
    name = f"{package['name']} {package['version']} ({package['license']})"
    folder = pathlib.Path(package["manifest_path"]).parent
    # Sources of C libraries are in a folder `vendor`.
    files = [
        file
        for parent in (folder, folder / "vendor")
        if parent.is_dir()
        for file in parent.iterdir()
        if file.is_file() and file.name.upper().startswith(NAMES)
    ]
    for text in [file.read_text(errors="replace").strip() for file in files] or ["(no license file in the package)"]:
        texts.setdefault(text, set()).add(name)

for text, names in sorted(texts.items(), key=lambda item: sorted(item[1])):
    print("=" * 100, *sorted(names), "", text, "", sep="\n")
