"""Lets the Codex CLI run a command with a model that a Baton router serves.

Usage: codex.py http://HOST:PORT CODEX
CODEX is the program of the npm package. A grammar forces the answers of the model: a call of exec_command, then a text.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

from forced import Proxy

base, codex = sys.argv[1:]
work = pathlib.Path(tempfile.mkdtemp(prefix="baton-codex-"))
target = work / "greeting.txt"


def change(path, body):
    if path != "/v1/responses":
        return
    # The model of this test has a context of 8,192 tokens, less than Codex's own prompt.
    body["input"] = [item for item in body["input"] if item.get("role") != "developer"]
    body.update(max_output_tokens=200, temperature=0)
    if any(item["type"] == "function_call_output" for item in body["input"]):
        body.update(regex="The file is written\\.", tool_choice="none")
        return
    values = {"cmd": {"const": f"echo Hello from Baton > {target}"}}
    (tool,) = [tool for tool in body["tools"] if tool["name"] == "exec_command"]
    tool["parameters"] = {"type": "object", "properties": values, "required": list(values), "additionalProperties": False}
    body["tool_choice"] = {"type": "function", "name": "exec_command"}


proxy = Proxy(base, change)
settings = [
    "model_provider=baton", f'model_providers.baton={{name="Baton", base_url="{proxy.url}/v1"}}',
    "web_search=disabled", "features.multi_agent=false",
]
environment = {"PATH": os.environ["PATH"], "HOME": str(work), "CODEX_HOME": str(work)}
flags = [word for setting in settings for word in ("-c", setting)]
command = [codex, "exec", "-m", "smollm2-135m", *flags, "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
           "Write a greeting to greeting.txt."]
ran = subprocess.run(command, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
                     text=True, timeout=300)
assert ran.returncode == 0 and ran.stdout.strip() == "The file is written.", ran
assert target.read_text() == "Hello from Baton\n", ran
print("ok")
