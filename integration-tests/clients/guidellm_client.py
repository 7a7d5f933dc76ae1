"""Runs a benchmark of GuideLLM with synthetic prompts, as chats and as completions.

Usage: guidellm_client.py http://HOST:PORT
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

from gguf_tokenizer import save_tokenizer

REQUESTS, OUTPUT_TOKENS, WITHIN_S = 8, 16, 300

with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    save_tokenizer(folder)
    for path in ("/v1/chat/completions", "/v1/completions"):
        report = folder / "report.json"
        command = [
            pathlib.Path(sys.executable).parent / "guidellm", "run", "--disable-console",
            "--backend", f"kind=openai_http,target={sys.argv[1]},model=smollm2-135m,request_format={path}",
            "--tokenizer", f"kind=huggingface_auto,model={folder}",
            "--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={OUTPUT_TOKENS}",
            "--profile", "kind=concurrent,streams=2",
            "--constraint", f"kind=max_requests,count={REQUESTS}",
            "--output", f"kind=json,path={report}",
        ]
        subprocess.run(command, check=True, timeout=WITHIN_S, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
        metrics = benchmark["metrics"]
        totals = metrics["request_totals"]
        assert totals == {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}, (path, totals)
        tokens = metrics["output_token_count"]["successful"]
        assert tokens["min"] == tokens["max"] == OUTPUT_TOKENS, (path, tokens)
        assert metrics["time_to_first_token_ms"]["successful"]["min"] > 0, path
print("ok")
