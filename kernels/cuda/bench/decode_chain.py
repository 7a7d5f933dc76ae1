"""Measures the kernels of a decode step in one CUDA graph (norm + QKV + rope + KV store, attention, O + residual, norm + gate_up +
silu, down + residual for every layer; norm + lm_head), with and without programmatic dependent launch. Compares the time with the
memory-bound minimum. Omits embedding, sampling, and the copy of tokens to the host.

Needs libbaton_kernels.so in BATON_KERNELS_DIR. Writes chain-MODELS.json to OUT. Arguments: the peak read bandwidth in TB/s, models, and
--rows with numbers separated by commas. Each model has a process of its own, because a captured PyTorch GEMM refers to a workspace
that PyTorch frees with the cached memory.
"""
import ctypes
import math
import sys

import torch

from harness import Results, alternate, capture, check, stream
from abi import BF16, DTYPES, DecodeArgs
from skinny_gemm import F32, QKV, RESIDUAL, SILU, kernels, own, tile_of

PAGE = 16
MODELS = {"1B": (16, 2048, 32, 8, 64, 8192, 128256), "8B": (32, 4096, 32, 8, 128, 14336, 128256)}


class Model:
    def __init__(self, name, blocks):
        self.layers, self.hidden, self.heads, self.kv_heads, self.dim, self.ffn, self.vocab = MODELS[name]
        def weight(n, k):
            return torch.empty(n, k, dtype=torch.bfloat16, device="cuda").normal_().mul_(1 / k ** 0.5)
        self.weights = [dict(qkv=weight((self.heads + 2 * self.kv_heads) * self.dim, self.hidden), o=weight(self.hidden, self.heads * self.dim),
                             gate_up=weight(2 * self.ffn, self.hidden), down=weight(self.hidden, self.ffn),
                             norm1=torch.ones(self.hidden, device="cuda"), norm2=torch.ones(self.hidden, device="cuda")) for _ in range(self.layers)]
        self.head, self.norm = weight(self.vocab, self.hidden), torch.ones(self.hidden, device="cuda")
        self.kv = torch.empty(blocks, self.layers, 2, self.kv_heads, PAGE, self.dim, dtype=torch.bfloat16, device="cuda").normal_()
        self.freq = 500000.0 ** (-torch.arange(0, self.dim // 2, device="cuda").float() / (self.dim // 2))
        self.bytes = 2 * (self.layers * sum(self.weights[0][w].numel() for w in ("qkv", "o", "gate_up", "down")) + self.head.numel())

    def kv_bytes(self, rows, length):
        return rows * length * self.layers * 2 * self.kv_heads * self.dim * 2


class Step:
    def __init__(self, m, rows, length):
        self.m, self.rows = m, rows
        pages = (length + PAGE - 1) // PAGE
        self.table = torch.randperm(m.kv.shape[0])[:rows * pages].int().view(rows, pages).cuda()
        self.indptr = torch.arange(0, (rows + 1) * pages, pages, dtype=torch.int32, device="cuda")
        self.lens = torch.full((rows,), length, dtype=torch.int32, device="cuda")
        self.pos = self.lens - 1
        self.dest = (self.table[:, (length - 1) // PAGE] * PAGE + (length - 1) % PAGE).contiguous()
        self.start = torch.randn(rows, m.hidden, device="cuda")
        self.residual, self.mirror = self.start.clone(), torch.empty(rows, m.hidden, dtype=torch.bfloat16, device="cuda")
        new = lambda n, t=torch.bfloat16: torch.empty(rows, n, dtype=t, device="cuda")
        self.q, self.a, self.act, self.logits = new(m.heads * m.dim), new(m.heads * m.dim), new(m.ffn), new(m.vocab, torch.float32)
        self.counters = torch.zeros(rows * m.kv_heads, dtype=torch.int32, device="cuda")
        self.squares = torch.empty(rows, 4096, device="cuda")
        self.part = torch.empty(1 << 24, device="cuda")

    def gemm(self, layer, name, *arguments, **more):
        """Runs a GEMM of a layer."""
        own(self.m.weights[layer][name], *arguments, **more)

    def run(self, pdl, tiles, parts="qkv attn o gate_up down head"):
        m = self.m
        self.residual.copy_(self.start)
        kv, t = m.kv, tiles
        kernels.baton_programmatic_launch(pdl)
        pointer = lambda tensor: ctypes.c_void_p(tensor.data_ptr())
        check(kernels.baton_rms_norm(DTYPES[torch.bfloat16], pointer(self.residual), pointer(m.weights[0]["norm1"]), ctypes.c_float(1e-5),
                                     pointer(self.mirror), self.rows, m.hidden, stream()), "rms norm", kernels)
        norm = {}

        def add(layer, name, x, tile, next_norm):
            w = m.weights[layer][name]
            self.gemm(layer, name, x, RESIDUAL, None, tile, pdl, residual=self.residual, mirror=self.mirror, next_norm=next_norm, squares_out=self.squares)
            rows = tile or tile_of(w, self.rows)
            norm.update(squares=self.squares, squares_count=(m.hidden + rows - 1) // rows)
        for l, w in enumerate(m.weights):
            k, v = kv[0, l, 0], kv[0, l, 1]
            if "qkv" in parts:
                self.gemm(l, "qkv", self.mirror, QKV, self.q, t["qkv"], pdl, **norm, k=k, v=v, stride_block=kv.stride(0), stride_head=kv.stride(3),
                    stride_token=kv.stride(4), frequencies=m.freq, positions=self.pos, destinations=self.dest, query_heads=m.heads, kv_heads=m.kv_heads,
                    head_dim=m.dim)
            if "attn" in parts:
                args = DecodeArgs(self.q.data_ptr(), self.q.stride(0), k.data_ptr(), v.data_ptr(), kv.stride(0), kv.stride(3), kv.stride(4),
                                  self.table.data_ptr(), self.indptr.data_ptr(), self.lens.data_ptr(), self.a.data_ptr(), self.a.stride(0),
                                  self.part.data_ptr(), self.counters.data_ptr(), self.rows, m.kv_heads, m.heads // m.kv_heads, m.dim, 0,
                                  1 / math.sqrt(m.dim), 0, pdl, 0, BF16)
                check(kernels.baton_decode_attention(ctypes.byref(args), stream()), "attention", kernels)
            if "o" in parts.split():
                add(l, "o", self.a, t["o"], w["norm2"])
            if "gate_up" in parts:
                self.gemm(l, "gate_up", self.mirror, SILU, self.act, t["gate_up"], pdl, **norm)
            if "down" in parts:
                add(l, "down", self.act, t["down"], m.weights[l + 1]["norm1"] if l + 1 < m.layers else m.norm)
        if "head" in parts:
            own(m.head, self.mirror, F32, self.logits, t["head"], pdl, **norm)


def peer_products(m, rows):
    """Returns a function that runs the GEMMs of a step on cuBLAS, without the operations between them."""
    x, a, f = (torch.randn(rows, n, device="cuda").bfloat16() for n in (m.hidden, m.heads * m.dim, m.ffn))
    outs = {n: torch.empty(rows, w.shape[0], device="cuda", dtype=torch.bfloat16) for n, w in m.weights[0].items() if w.dim() == 2}
    head = torch.empty(rows, m.vocab, device="cuda", dtype=torch.bfloat16)

    def work():
        for w in m.weights:
            torch.mm(x, w["qkv"].t(), out=outs["qkv"])
            torch.mm(a, w["o"].t(), out=outs["o"])
            torch.mm(x, w["gate_up"].t(), out=outs["gate_up"])
            torch.mm(f, w["down"].t(), out=outs["down"])
        torch.mm(x, m.head.t(), out=head)
    return work


def main():
    batches = [1, 8, 16, 32, 64]
    if "--rows" in sys.argv:
        at = sys.argv.index("--rows")
        batches = [int(rows) for rows in sys.argv[at + 1].split(",")]
        del sys.argv[at:at + 2]
    best = float(sys.argv[1]) if len(sys.argv) > 1 else 4.3
    results = Results("chain-" + "-".join(sys.argv[2:] or MODELS) + ".json")
    def tiles(qkv, o, gate_up, down, head):
        return {"qkv": qkv, "o": o, "gate_up": gate_up, "down": down, "head": head}
    sets = {",".join(map(str, t)): tiles(*t) for t in ((0, 0, 0, 0, 0), (32, 32, 64, 16, 64), (32, 32, 32, 32, 32))}
    mixed = sets["0,0,0,0,0"]
    for name in sys.argv[2:] or MODELS:
        m, keep = Model(name, 4096), []
        for rows, length in ((rows, 512) for rows in batches):
            s = Step(m, rows, length)
            floor = (m.bytes + m.kv_bytes(rows, length)) / best / 1e6
            peer = peer_products(m, rows)
            graphs = {"cuBLAS products alone": capture(peer)}
            for label, tile_set in sets.items() if rows <= 16 else [("0,0,0,0,0", mixed)]:
                for pdl in (0, 1):
                    graphs[f"{label} step pdl {pdl}"] = capture(lambda: s.run(pdl, tile_set))
            for part in ("nothing", "qkv", "attn", "o", "gate_up", "down", "head"):
                for pdl in (0, 1):
                    graphs[f"only {part} pdl {pdl}"] = capture(lambda: s.run(pdl, mixed, part))
            logits = {}
            for case, graph in graphs.items():
                if "step" in case:
                    graph.replay()
                    torch.cuda.synchronize()
                    logits[case] = s.logits.clone()
            worst = 0.0
            for label in sets if rows <= 16 else ["0,0,0,0,0"]:
                cases = [c for c in logits if c.startswith(label + " ")]
                base = logits[cases[0]]
                worst = max([worst] + [((logits[c] - base).norm() / base.norm()).item() for c in cases])
                assert base.isfinite().all()
            timed = alternate(graphs, 15)
            keep.append((graphs, peer, s))
            print(f"{name} {rows} x {length}: floor {floor:.0f} us; logits of the cases differ by {worst:.1e}")
            for case, (mid, lo, hi) in timed.items():
                results.add(model=name, rows=rows, length=length, case=case, us=mid, low=lo, high=hi, floor=floor, fraction_of_peak=floor / mid, differ=worst)
                print(f"  {case:34s} {mid:8.1f} us  {100 * floor / mid:5.1f} %")


if __name__ == "__main__":
    main()
