"""FP8 KV against bf16 KV: decode attention, dequantization for prefill, and RoPE with the store, for builds of the library in turn.

fp8_kv.py LABEL=PATH...: each build's times (µs a layer) in graphs of all layers with programmatic launch, medians of 11 replays.
Needs PyTorch and one GPU.
"""
import math
import sys

import torch

from harness import alternate, capture
from abi import BF16, FP8, DecodeArgs, Kv, Library, RopeArgs

LAYERS, PAGE, PEAK = 32, 16, 4.65  # peak read bandwidth in TB/s
libraries = {label: Library(path) for label, path in (item.split("=") for item in sys.argv[1:])}
DECODE = [(8, 4, 128, rows, length) for rows, length in ((32, 8192), (1, 512), (8, 512), (32, 512), (128, 512), (1, 8192))]
DECODE += [(8, 8, 64, 32, 8192), (8, 16, 128, 32, 8192), (8, 16, 128, 1, 512), (4, 16, 64, 32, 8192), (4, 2, 256, 32, 8192),
           (4, 8, 256, 32, 8192), (4, 16, 256, 32, 8192), (4, 2, 256, 1, 512)]
memory = torch.empty(40 << 30, dtype=torch.uint8, device="cuda")


def arena(kv_dtype, heads, dim, blocks):
    """Returns the baton_kv of random values in `memory`."""
    if kv_dtype == BF16:
        elements = LAYERS * 2 * heads * PAGE * dim
        part = memory[: 2 * blocks * elements].view(torch.bfloat16)
        for at in range(0, part.numel(), 1 << 30):
            part[at : at + (1 << 30)].normal_()
    else:
        elements = LAYERS * 2 * heads * PAGE * (dim + 1)
        part = memory[: blocks * elements]
        for at in range(0, part.numel(), 1 << 30):
            part[at : at + (1 << 30)].random_().bitwise_and_(0xBF)
        part.view(-1, PAGE * (dim + 1))[:, PAGE * dim :] = 126
    assert part.data_ptr() == memory.data_ptr()
    return Kv(memory.data_ptr(), elements, blocks, LAYERS, heads, dim, kv_dtype, 0)


def decode(heads, group, dim, rows, length):
    pages, times = length // PAGE, {}
    blocks = rows * pages
    table = torch.randperm(blocks, device="cuda").int()
    indptr = torch.arange(0, blocks + 1, pages, dtype=torch.int32, device="cuda")
    lens = torch.full((rows,), length, dtype=torch.int32, device="cuda")
    q = torch.randn(rows, heads * group, dim, device="cuda").bfloat16()
    out, counters = torch.empty_like(q), torch.zeros(rows * heads, dtype=torch.int32, device="cuda")
    for kv_dtype in (BF16, FP8):
        kv = arena(kv_dtype, heads, dim, blocks)
        size, token = (2, dim) if kv_dtype == BF16 else (1, dim + 1)
        graphs = {}
        for label, library in libraries.items():
            partial = torch.empty(library.raw.baton_decode_attention_workspace(0, heads, group, dim) // 4, device="cuda")

            def run():
                for layer in range(LAYERS):
                    keys = memory.data_ptr() + layer * 2 * heads * PAGE * token * size
                    library.decode_attention(DecodeArgs(
                        q.data_ptr(), q.stride(0), keys, keys + heads * PAGE * token * size, kv.block_elements, PAGE * token, dim,
                        table.data_ptr(), indptr.data_ptr(), lens.data_ptr(), out.data_ptr(), q.stride(0), partial.data_ptr(),
                        counters.data_ptr(), rows, heads, group, dim, 0, 1 / math.sqrt(dim), 0, 1, 1, kv_dtype))
            graphs[label] = capture(run), partial
        floor = rows * length * 2 * heads * token * size / PEAK / 1e6
        times = alternate({label: graph for label, (graph, _) in graphs.items()}, 11)
        for label, (middle, low, high) in times.items():
            us = middle / LAYERS
            print(f"decode {heads}x{group} dim {dim} {rows} x {length} {'bf16' if kv_dtype == BF16 else 'FP8 '} {label:8s} "
                  f"{us:8.2f} us ({low / LAYERS:.2f} to {high / LAYERS:.2f}), {100 * floor / us:.0f} % of peak", flush=True)


def dequantize(heads, dim, pages):
    kv = arena(FP8, heads, dim, pages)
    table = torch.randperm(pages, device="cuda").int()
    out = torch.empty(pages * 2 * heads * PAGE * dim, dtype=torch.bfloat16, device="cuda")

    def runs(library):
        return lambda: [library.dequantize_kv(kv, layer, table, pages, out) for layer in range(LAYERS)]

    moved = pages * 2 * heads * PAGE * (3 * dim + 1)
    for label, (middle, *_) in alternate({label: capture(runs(library)) for label, library in libraries.items()}, 11).items():
        us = middle / LAYERS
        print(f"dequantize {heads} heads of {dim}, {pages} pages, {label:8s} {us:8.2f} us, {moved / us / 1e6:.2f} TB/s", flush=True)


def rope(rows):
    heads, group, dim = 8, 4, 128
    width = heads * (group + 2) * dim
    qkv, blocks = torch.randn(rows, width, device="cuda").bfloat16(), rows // PAGE + 1
    frequencies = torch.rand(dim // 2, device="cuda")
    positions = torch.arange(rows, dtype=torch.int32, device="cuda")
    graphs = {}
    for kv_dtype in (BF16, FP8):
        elements = LAYERS * 2 * heads * PAGE * (dim + (kv_dtype == FP8))
        kv = Kv(memory.data_ptr(), elements, blocks, LAYERS, heads, dim, kv_dtype, 0)

        def runs(library, kv=kv):
            return lambda: [library.rope_store_kv(kv, RopeArgs(
                qkv.data_ptr(), qkv.data_ptr(), width, None, None, None, frequencies.data_ptr(), positions.data_ptr(),
                positions.data_ptr(), 1e-6, heads * group, layer, rows, dim, 0)) for layer in range(LAYERS)]

        for label, library in libraries.items():
            graphs[label, "bf16" if kv_dtype == BF16 else "FP8"] = capture(runs(library))
    for (label, kind), (middle, *_) in alternate(graphs, 11).items():
        print(f"rope and store, {rows} rows, {kind:4s} {label:8s} {middle / LAYERS:8.2f} us", flush=True)


for library in libraries.values():
    library.initialise()
    library.raw.baton_programmatic_launch(1)
for shape in DECODE:
    decode(*shape)
for rows in (1, 32, 8192):
    rope(rows)
for shape in ((8, 128, 512), (8, 128, 8), (8, 64, 512), (4, 256, 512)):
    dequantize(*shape)
