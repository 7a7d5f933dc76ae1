"""Measures layers of Qwen3-30B-A3B sizes in FP8 in one CUDA graph, for one or more builds of the library in turn: QKV, rope + KV
store, attention, quantization, O + residual, router, the GEMMs of the experts, and the sum of the experts + norm + quantization. Omits
embedding, head and sampling. Compares the residual stream of each build with that of the first.

Arguments: builds as LABEL=PATH; --rows: numbers of rows, separated by commas; --layers: number of layers; --trace: also prints the
time of each kernel.
"""
import argparse
import ctypes
import json
import math
import statistics
import tempfile

import torch

from harness import alternate, capture, check, stream
from abi import BF16, CombineArgs, DecodeArgs, ExpertGemmArgs, Kv, QuantizeArgs, RopeArgs, RouteArgs, SkinnyArgs

HIDDEN, HEADS, KV_HEADS, DIM, EXPERTS, CHOSEN, INNER = 2048, 32, 4, 128, 128, 8, 768
QKV_WIDTH, QUERY_WIDTH = (HEADS + 2 * KV_HEADS) * DIM, HEADS * DIM
LENGTH, PAGE, EPS = 512, 16, 1e-6
PLAIN, RESIDUAL = 0, 1
KERNELS = ("quantize", "rope_store", "route", "expert_gemm", "combine", "wide_gemm", "attention", "rms_norm")


def fp8(*sizes):
    """Returns random FP8 numbers without NaN."""
    bits = torch.randint(0, 256, sizes, device="cuda", dtype=torch.uint8)
    return torch.where((bits & 0x7F) == 0x7F, bits - 1, bits)


def scales(*sizes, depth):
    return (torch.rand(sizes, device="cuda") + 0.5) / (depth ** 0.5 * 130)


class Layer:
    def __init__(self):
        ones = lambda width: torch.ones(width, device="cuda")
        self.qkv, self.qkv_scales = fp8(QKV_WIDTH, HIDDEN), scales(QKV_WIDTH, depth=HIDDEN)
        self.o, self.o_scales = fp8(HIDDEN, QUERY_WIDTH), scales(HIDDEN, depth=QUERY_WIDTH)
        self.gate_up, self.gate_up_scales = fp8(EXPERTS, 2 * INNER, HIDDEN), scales(EXPERTS, 2 * INNER, depth=HIDDEN)
        self.down, self.down_scales = fp8(EXPERTS, HIDDEN, INNER), scales(EXPERTS, HIDDEN, depth=INNER)
        self.router = (torch.randn(EXPERTS, HIDDEN, device="cuda") / HIDDEN ** 0.5).bfloat16()
        self.norm, self.ffn_norm, self.query_norm, self.key_norm = ones(HIDDEN), ones(HIDDEN), ones(DIM), ones(DIM)


class Library:
    def __init__(self, path):
        self.raw = ctypes.CDLL(path)
        self.raw.baton_last_error.restype = ctypes.c_char_p
        check(self.raw.baton_initialise(), "initialise", self.raw)

    def call(self, name, *arguments):
        plain = [ctypes.byref(a) if isinstance(a, ctypes.Structure) else ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a
                 for a in arguments]
        check(getattr(self.raw, f"baton_{name}")(*plain, stream()), name, self.raw)


def fill(struct, **values):
    return struct(**{key: value.data_ptr() if isinstance(value, torch.Tensor) else value for key, value in values.items()})


class Step:
    """A step of `rows` sequences of LENGTH tokens."""

    def __init__(self, library, layers, kv, rows):
        self.library, self.layers, self.kv, self.rows = library, layers, kv, rows
        self.kv_args = Kv(kv.data_ptr(), kv[0].numel(), kv.shape[0], len(layers), KV_HEADS, DIM, 1, 0)
        new = lambda *sizes, dtype=torch.bfloat16: torch.zeros(*sizes, dtype=dtype, device="cuda")
        floats = lambda *sizes: new(*sizes, dtype=torch.float32)
        numbers = lambda *sizes: new(*sizes, dtype=torch.int32)
        seeded, pages = torch.Generator().manual_seed(rows), LENGTH // PAGE
        self.table = torch.randperm(kv.shape[0], generator=seeded)[:rows * pages].int().view(rows, pages).cuda()
        self.page_indptr = torch.arange(0, (rows + 1) * pages, pages, dtype=torch.int32, device="cuda")
        self.lengths = torch.full((rows,), LENGTH, dtype=torch.int32, device="cuda")
        self.positions, self.destinations = self.lengths - 1, (self.table[:, -1] * PAGE + PAGE - 1).contiguous()
        self.frequencies = 1e6 ** (-torch.arange(0, DIM // 2, device="cuda").float() / (DIM // 2))
        self.start = torch.randn(rows, HIDDEN, generator=seeded).cuda()
        self.residual, self.normed = floats(rows, HIDDEN), new(rows, HIDDEN)
        self.qkv, self.attended = new(rows, QKV_WIDTH), new(rows, QUERY_WIDTH)
        self.parts = 2 if rows <= 32 else 1
        self.quantized, self.quantized_scales = new(2 * (rows + 8), QUERY_WIDTH, dtype=torch.uint8), floats(rows)
        self.squares, self.partial, self.counters = floats(rows, HIDDEN), floats(1 << 22), numbers(rows * KV_HEADS)
        self.split, self.scales = new(rows, 2, HIDDEN, dtype=torch.uint8), floats(rows)
        self.expert_of, self.weights = numbers(rows, CHOSEN), floats(rows, CHOSEN)
        self.offsets, self.order, self.arrivals = numbers(EXPERTS + 1), numbers(rows * CHOSEN), numbers(1)
        self.factor_stride = (INNER + 127) // 128 * 2
        self.activated, self.factors = new(rows * CHOSEN, INNER), floats(rows * CHOSEN, self.factor_stride)
        self.outputs = new(rows, CHOSEN, HIDDEN)

    def quantize(self, x):
        self.library.call("quantize", fill(QuantizeArgs, x=x, x_stride=x.shape[1], out=self.quantized, scales=self.quantized_scales,
                                           rows=self.rows, width=x.shape[1], parts=self.parts))

    def gemm(self, weight, weight_scales, epilogue, **more):
        (n, depth), rows = weight.shape, self.rows
        args = fill(SkinnyArgs, weight=weight, weight_scales=weight_scales, x=self.quantized, x_scales=self.quantized_scales, x_stride=depth,
                    rows=rows, n=n, depth=depth, epilogue=epilogue, pdl=1, parts=self.parts, **more)
        self.library.call("skinny_gemm", args)
        return self.library.raw.baton_skinny_gemm_tile(ctypes.byref(args))

    def experts(self, layer, next_norm, squares_count):
        rows, call = self.rows, self.library.call
        call("route", fill(RouteArgs, x=self.normed, x_stride=HIDDEN, squares=self.squares, router=layer.router, split=self.split,
                           expert_of=self.expert_of, weights=self.weights, scales=self.scales, offsets=self.offsets, order=self.order,
                           arrivals=self.arrivals, eps=EPS, squares_count=squares_count, rows=rows, hidden=HIDDEN, experts=EXPERTS,
                           count=CHOSEN, is_normalized=1, groups=1, groups_chosen=1, scale=1.0))
        shared = dict(offsets=self.offsets, order=self.order, factors=self.factors, factor_stride=self.factor_stride, parts=2, rows=rows,
                      experts=EXPERTS, count=CHOSEN, pdl=1)
        call("expert_gemm", fill(ExpertGemmArgs, weight=layer.gate_up, weight_stride=2 * INNER * HIDDEN, weight_scales=layer.gate_up_scales,
                                 weight_scales_stride=2 * INNER, x=self.split, x_stride=HIDDEN, scales=self.scales, out=self.activated,
                                 out_stride=INNER, n=2 * INNER, depth=HIDDEN, is_gate_up=1, **shared))
        call("expert_gemm", fill(ExpertGemmArgs, weight=layer.down, weight_stride=HIDDEN * INNER, weight_scales=layer.down_scales,
                                 weight_scales_stride=HIDDEN, x=self.activated, x_stride=INNER, out=self.outputs, out_stride=HIDDEN,
                                 n=HIDDEN, depth=INNER, **shared))
        call("combine_experts", fill(CombineArgs, outputs=self.outputs, weights=self.weights, residual=self.residual, norm=next_norm,
                                     out=self.normed, quantized=self.quantized, scales=self.quantized_scales, eps=EPS, count=CHOSEN,
                                     rows=rows, width=HIDDEN, parts=self.parts))

    def run(self):
        rows, call = self.rows, self.library.call
        self.library.raw.baton_programmatic_launch(1)
        self.residual.copy_(self.start)
        call("rms_norm", 1, self.residual, self.layers[0].norm, ctypes.c_float(EPS), self.normed, rows, HIDDEN)
        self.quantize(self.normed)
        for index, layer in enumerate(self.layers):
            self.gemm(layer.qkv, layer.qkv_scales, PLAIN, out=self.qkv, out_stride=QKV_WIDTH)
            call("rope_store_kv", self.kv_args, fill(
                RopeArgs, qkv=self.qkv, queries=self.qkv, query_stride=QKV_WIDTH, query_norm=layer.query_norm, key_norm=layer.key_norm,
                frequencies=self.frequencies, positions=self.positions, destinations=self.destinations, norm_eps=EPS, query_heads=HEADS,
                layer=index, rows=rows, rotary_dim=DIM))
            keys, values, kv = self.kv[0, index, 0], self.kv[0, index, 1], self.kv
            call("decode_attention", fill(
                DecodeArgs, q=self.qkv, q_stride=QKV_WIDTH, k=keys, v=values, stride_block=kv.stride(0), stride_head=kv.stride(3),
                stride_token=kv.stride(4), pages=self.table, page_indptr=self.page_indptr, kv_len=self.lengths, out=self.attended,
                out_stride=QUERY_WIDTH, partial=self.partial, counters=self.counters, rows=rows, kv_heads=KV_HEADS,
                group=HEADS // KV_HEADS, head_dim=DIM, scale=1 / math.sqrt(DIM), pdl=1, kv_dtype=BF16))
            self.quantize(self.attended)
            tile = self.gemm(layer.o, layer.o_scales, RESIDUAL, residual=self.residual, mirror=self.normed,
                             next_norm=layer.ffn_norm, squares_out=self.squares)
            self.experts(layer, self.layers[(index + 1) % len(self.layers)].norm, (HIDDEN + tile - 1) // tile)


def print_trace(graph, layers, replays=5):
    """Prints the median duration of each kernel of a layer, and the median time from its predecessor's end to its own end."""
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        recorded.export_chrome_trace(file.name)
        events = [e for e in json.load(open(file.name))["traceEvents"] if e.get("cat") == "kernel"]
    events.sort(key=lambda e: e["ts"])
    of_replay, of_layer = len(events) // replays, 9
    durations, own = [[] for _ in range(of_layer)], [[] for _ in range(of_layer)]
    end = lambda e: e["ts"] + e["dur"]
    for replay in range(replays):
        kernels = events[replay * of_replay:(replay + 1) * of_replay][-of_layer * layers:]
        for i in range(of_layer, len(kernels)):
            durations[i % of_layer].append(kernels[i]["dur"])
            own[i % of_layer].append(end(kernels[i]) - end(kernels[i - 1]))
    for i in range(of_layer):
        name = next((known for known in KERNELS if known in kernels[i]["name"]), kernels[i]["name"])
        print(f"    {name:12s} duration {statistics.median(durations[i]):7.2f} us, after the predecessor {statistics.median(own[i]):7.2f} us")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("builds", nargs="+")
    parser.add_argument("--rows", default="1,8,32,128")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--trace", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(1)
    batches = [int(rows) for rows in options.rows.split(",")]
    layers = [Layer() for _ in range(options.layers)]
    blocks = max(batches) * (LENGTH // PAGE)
    kv = torch.empty(blocks, len(layers), 2, KV_HEADS, PAGE, DIM, dtype=torch.bfloat16, device="cuda").normal_()
    libraries = {label: Library(path) for label, path in (build.split("=", 1) for build in options.builds)}
    for rows in batches:
        steps = {label: Step(library, layers, kv, rows) for label, library in libraries.items()}
        graphs = {label: capture(step.run) for label, step in steps.items()}
        timed, first = alternate(graphs, 25), next(iter(steps.values())).residual
        for label, (median, low, high) in timed.items():
            differs = ((steps[label].residual - first).norm() / first.norm()).item()
            print(f"{rows} rows, {label}: {median / len(layers):.1f} us per layer ({low / len(layers):.1f} to {high / len(layers):.1f}), "
                  f"differs by {differs:.1e}")
            if options.trace:
                print_trace(graphs[label], len(layers))


if __name__ == "__main__":
    main()
