"""Runs a benchmark of AIPerf with synthetic prompts, as chats and as completions.

Usage: aiperf_client.py http://HOST:PORT
"""

import json
import pathlib
import subprocess
import sys
import tempfile

from gguf_tokenizer import save_tokenizer

REQUESTS, OUTPUT_TOKENS, WITHIN_S = 8, 16, 300

with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    save_tokenizer(folder)
    for endpoint in ("chat", "completions"):
        results = folder / endpoint
        command = [
            pathlib.Path(sys.executable).parent / "aiperf", "profile", "--url", sys.argv[1], "--model", "smollm2-135m",
            "--endpoint-type", endpoint, "--streaming", "--tokenizer", folder, "--request-count", str(REQUESTS),
            "--concurrency", "2", "--synthetic-input-tokens-mean", "64", "--output-tokens-mean", str(OUTPUT_TOKENS),
            "--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--ui", "none", "--artifact-dir", results,
        ]
        subprocess.run(command, check=True, timeout=WITHIN_S, stdout=subprocess.DEVNULL)
        report = json.loads((results / "profile_export_aiperf.json").read_text())
        assert report["request_count"]["avg"] == REQUESTS and not report["error_summary"], report
        tokens = report["output_sequence_length"]
        assert tokens["min"] == tokens["max"] == OUTPUT_TOKENS, tokens
        assert report["time_to_first_token"]["min"] > 0, report
print("ok")
