"""Lets Claude Code write a file with a model that a Baton router serves.

Usage: claude_code.py http://HOST:PORT CLAUDE
CLAUDE is the program of the npm package. A grammar forces the answers of the model: a call of Write, then a text.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

from forced import Proxy

base, claude = sys.argv[1:]
work = pathlib.Path(tempfile.mkdtemp(prefix="baton-claude-"))
target = work / "greeting.txt"


def change(path, body):
    if not path.startswith("/v1/messages"):
        return
    body.update(max_tokens=400, temperature=0)
    last = body["messages"][-1]["content"]
    if any(block["type"] == "tool_result" for block in last if isinstance(block, dict)):
        body.update(regex="The file is written\\.", tool_choice={"type": "none"})
        return
    body["tool_choice"] = {"type": "tool", "name": "Write"}
    for tool in body["tools"]:
        if tool["name"] == "Write":
            values = {"file_path": {"const": str(target)}, "content": {"const": "Hello from Baton"}}
            tool["input_schema"] = {"type": "object", "properties": values, "required": list(values),
                                    "additionalProperties": False}


proxy = Proxy(base, change)
environment = {
    "PATH": os.environ["PATH"], "HOME": str(work), "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "ANTHROPIC_BASE_URL": proxy.url, "ANTHROPIC_AUTH_TOKEN": "unused", "ANTHROPIC_MODEL": "smollm2-135m",
}
# The model of this test has a context of 8,192 tokens, less than Claude Code's own system prompt and tools.
command = [claude, "-p", "Write a greeting to greeting.txt.", "--tools", "Write", "--allowedTools", "Write",
           "--system-prompt", "You write files."]
ran = subprocess.run(command, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
                     text=True, timeout=300)
assert ran.returncode == 0 and ran.stdout.strip() == "The file is written.", ran
assert target.read_text() == "Hello from Baton", ran
(result,) = [block for block in proxy.bodies[-1]["messages"][-1]["content"] if block["type"] == "tool_result"]
assert not result.get("is_error"), result
print("ok")
