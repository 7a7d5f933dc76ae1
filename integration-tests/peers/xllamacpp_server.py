"""Runs llama.cpp's OpenAI server from the PyPI package xllamacpp, as a baseline for `baton bench serve`.

    pip install xllamacpp
    python3 xllamacpp_server.py MODEL.gguf [--port 8090] [--slots 8] [--context 4096] [--threads 2]

Serves until it is interrupted. --context is for each slot.
"""

import argparse
import signal

import xllamacpp

arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
arguments.add_argument("model", help="a GGUF file")
arguments.add_argument("--port", type=int, default=8090)
arguments.add_argument("--slots", type=int, default=8, help="sequences in one batch")
arguments.add_argument("--context", type=int, default=4096, help="tokens of one slot")
arguments.add_argument("--threads", type=int, default=2)
given = arguments.parse_args()

params = xllamacpp.CommonParams()
params.model.path = given.model
params.port = given.port
params.n_parallel = given.slots
params.n_ctx = given.context * given.slots
params.cpuparams.n_threads = given.threads
params.cpuparams_batch.n_threads = given.threads
params.n_gpu_layers = 0

server = xllamacpp.Server(params)
print("serving at", server.listening_address, flush=True)
signal.sigwait({signal.SIGINT, signal.SIGTERM})
