#!/usr/bin/env python3
"""Prints the licenses of Baton's Rust dependencies. Each text is printed once, below the names of its packages."""

import json
import os
import pathlib
import subprocess

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
