#!/usr/bin/env python3
"""Runs unmodified clients against a cluster on this machine, each with one scripted task.

Usage: run.py BIN_DIR [NAME...]
BIN_DIR has the binaries of Baton. Without names all clients run. Pinned versions are installed below target/clients,
which needs the registries of PyPI and npm; the tasks themselves use the loopback interface only. A grammar forces the
answers where a small model would not give them.
"""

import os
import pathlib
import signal
import subprocess
import sys
import time
import venv

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "clients"
READY_WITHIN_S, INSTALLED_WITHIN_S, DONE_WITHIN_S, STOPPED_WITHIN_S = 120, 1800, 700, 60

# Scripts and packages of each client.
PYTHON = {
    "openai": (["../tests/openai_client.py", "../tests/openai_tools.py"], ["openai==3.57.0"]),
    "anthropic": (["anthropic_client.py"], ["anthropic==2.14.0"]),
    "litellm": (["litellm_client.py"], ["litellm==1.110.2"]),
    "langchain": (["langchain_client.py"], ["langchain-openai==1.7.4", "langchain-anthropic==1.7.10"]),
    "llama-index": (["llama_index_client.py"], ["llama-index-llms-openai-like==0.8.1"]),
    "instructor": (["instructor_client.py"], ["instructor==1.17.0"]),
    "pydantic-ai": (["pydantic_ai_client.py"], ["pydantic-ai-slim[openai]==2.68.0"]),
    "openai-agents": (["openai_agents_client.py"], ["openai-agents==0.24.0"]),
    "lm-eval": (["lm_eval_client.py"], ["lm_eval[api]==0.4.13", "torch==2.15.0", "transformers==5.24.0", "gguf==0.19.0"]),
    "guidellm": (["guidellm_client.py"], ["guidellm==0.8.1", "gguf==0.19.0"]),
    "aiperf": (["aiperf_client.py"], ["aiperf==0.13.0", "gguf==0.19.0"]),
}
# Script, packages and, if the client is a program, its path in the folder of the packages.
NODE = {
    "ai-sdk": ("ai_sdk.mjs", ["ai@6.0.326", "@ai-sdk/anthropic@3.0.140", "@ai-sdk/openai-compatible@2.0.92", "zod@4.6.7"], None),
    "claude-code": ("claude_code.py", ["@anthropic-ai/claude-code@2.1.197"], "@anthropic-ai/claude-code-*/claude"),
    "codex": ("codex.py", ["@openai/codex@0.171.0"], ".bin/codex"),
}


def run(command, within_s, **options):
    subprocess.run([str(word) for word in command], check=True, timeout=within_s, **options)


def python_commands(name, url):
    scripts, packages = PYTHON[name]
    folder = TARGET / name
    python = folder / "bin/python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages], INSTALLED_WITHIN_S)
    return [[python, HERE / script, url] for script in scripts]


def node_commands(name, url):
    script, packages, program = NODE[name]
    folder = TARGET / name
    folder.mkdir(parents=True, exist_ok=True)
    run(["npm", "install", "--prefix", folder, "--no-fund", "--no-audit", "--loglevel=error", *packages],
        INSTALLED_WITHIN_S)
    if program:
        (path,) = (folder / "node_modules").glob(program)
        return [[sys.executable, HERE / script, url, path]]
    # Node resolves packages from the folder of the script.
    copy = folder / script
    copy.write_text((HERE / script).read_text())
    return [["node", copy, url]]


def url_of(cluster, log):
    """Waits until the cluster is ready, and returns the address of its router."""
    end = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < end and cluster.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("baton: ready"):
                return next(word for word in line.split() if word.startswith("http://")).removesuffix("/v1")
        time.sleep(0.2)
    raise SystemExit(f"the cluster is not ready after {READY_WITHIN_S} s; its log is {log}")


def main():
    binaries, *names = sys.argv[1:]
    known = [*PYTHON, *NODE]
    unknown = set(names) - set(known)
    if unknown:
        sys.exit(f"unknown client {', '.join(sorted(unknown))}; allowed: {', '.join(known)}")
    # The model's own template does not render tools. lm-eval's results are compared with those of transformers in f32.
    template = HERE.parent / "tests/tool_template.jinja"
    environment = {**os.environ, "BATON_MODEL_CHAT_TEMPLATE": str(template), "BATON_MODEL_DTYPE": "f32"}
    flags = ["--model", "smollm2-135m", "--models-dir", ROOT / "models", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    command = [str(word) for word in [pathlib.Path(binaries) / "baton", "up", *flags]]
    log = TARGET / "cluster.log"
    TARGET.mkdir(parents=True, exist_ok=True)
    with log.open("w") as lines:
        cluster = subprocess.Popen(command, env=environment, stderr=lines)
    failed = []
    try:
        url = url_of(cluster, log)
        for name in names or known:
            print(f"{name}: ", end="", flush=True)
            try:
                for task in (python_commands if name in PYTHON else node_commands)(name, url):
                    run(task, DONE_WITHIN_S)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                print(error)
                failed.append(name)
    finally:
        cluster.send_signal(signal.SIGINT)
        cluster.wait(STOPPED_WITHIN_S)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


main()
