"""Code shared by the benchmarks: loading the kernels, graphs, alternating timing, and results as JSON.

Times are medians over graph replays. The cases of a comparison are replayed in turn, so that drift of the GPU affects all
cases equally. Before a graph reads any byte again, it reads more bytes than the L2 cache holds.
"""
import ctypes
import json
import os
import statistics
import sys

import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests"))
FOLDER = os.environ.get("BATON_KERNELS_DIR", os.path.dirname(os.path.abspath(__file__)))


def load(name):
    return ctypes.CDLL(os.path.join(FOLDER, name))


def load_kernels():
    """Loads Baton's library and its kernels."""
    library = load("libbaton_kernels.so")
    library.baton_last_error.restype = ctypes.c_char_p
    library.baton_decode_attention_workspace.restype = ctypes.c_int64
    check(library.baton_initialise(), "initialise", library)
    return library


def ptr(tensor, elements=0):
    return ctypes.c_void_p(tensor.data_ptr() + elements * tensor.element_size())


def stream():
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def check(code, what, library=None):
    if code != 0:
        text = library.baton_last_error().decode() if library else ""
        raise RuntimeError(f"{what} returned {code} {text}")


def capture(work):
    """Runs `work` once outside a graph to load its kernels, captures it, and returns the graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def alternate(graphs, replays, warm=2):
    """Returns median, minimum and maximum time of a replay of each graph in microseconds. Replays the graphs in turn."""
    times = {name: [] for name in graphs}
    for turn in range(warm + replays):
        for name, graph in graphs.items():
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            graph.replay()
            b.record()
            torch.cuda.synchronize()
            if turn >= warm:
                times[name].append(a.elapsed_time(b) * 1000)
    return {n: (statistics.median(t), min(t), max(t)) for n, t in times.items()}


class Results:
    def __init__(self, name):
        self.path = os.path.join(os.environ.get("OUT", "."), name)
        self.rows = []

    def add(self, **row):
        self.rows.append(row)
        with open(self.path, "w") as f:
            json.dump(self.rows, f, indent=1)


def relative_error(out, ref):
    out, ref = out.double(), ref.double()
    return ((out - ref).norm() / ref.norm().clamp_min(1e-30)).item()
