"""Checks low-rank updates (LoRA) against f32, then measures a decode step of an 8B model with adapters on all matrices, beside the same
step without adapters, in CUDA graphs with programmatic dependent launch.

Needs libbaton_kernels.so in BATON_KERNELS_DIR. Writes low-rank.json to OUT. Arguments: the peak read bandwidth in TB/s, and --quick for
correctness only.
"""
import ctypes
import sys

import torch

from harness import Results, alternate, capture, check, relative_error, stream
from abi import LowRank
from decode_chain import Model, Step
from skinny_gemm import PLAIN, RESIDUAL, SILU, kernels, own, tiles_of

QUICK = "--quick" in sys.argv


class Update:
    """Adapters of the given ranks for a matrix of n outputs, which start with `firsts`."""

    def __init__(self, n, depth, firsts, ranks, rank_max, rows, scale=1.0):
        self.n, self.depth, self.bounds, self.ranks = n, depth, [0, *firsts, n], ranks
        new = lambda *shape: torch.randn(*shape, device="cuda").mul_(scale).bfloat16()
        ranges = len(firsts) + 1
        self.a = new(len(ranks), ranges * rank_max * depth).mul_(1 / depth ** 0.5)
        self.b = new(len(ranks), n * rank_max)
        self.device_ranks = torch.tensor(ranks, dtype=torch.int32, device="cuda")
        self.shrunk = torch.full((max(rows, 1024), ranges * rank_max), float("nan"), device="cuda")
        self.progress = torch.zeros(1, dtype=torch.int64, device="cuda")
        bounds = (ctypes.c_int32 * 2)(*[*firsts, n, n][:2])
        self.struct = LowRank(a=self.a.data_ptr(), b=self.b.data_ptr(), ranks=self.device_ranks.data_ptr(), shrunk=self.shrunk.data_ptr(),
                              progress=self.progress.data_ptr(), firsts=bounds, ranges=ranges, rank_max=rank_max, slots=len(ranks))

    def of_rows(self, adapters):
        self.struct.row_adapters = adapters.data_ptr()
        self.struct.parts = kernels.baton_shrink_parts(len(adapters), self.depth)
        return self.struct

    def shrink(self, x):
        check(kernels.baton_shrink(ctypes.byref(self.struct), ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(x.stride(0)), x.shape[0], self.n,
                                   self.depth, stream()), "shrink", kernels)

    def expand(self, out):
        check(kernels.baton_expand(ctypes.byref(self.struct), ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(out.stride(0)), out.shape[0],
                                   self.n, stream()), "expand", kernels)

    def reference(self, x, adapters):
        out = torch.zeros(x.shape[0], self.n, device="cuda")
        for slot, rank in enumerate(self.ranks):
            rows = (adapters == slot).nonzero().flatten()
            if rank == 0 or len(rows) == 0:
                continue
            a = self.a[slot][:(len(self.bounds) - 1) * rank * self.depth].view(-1, rank, self.depth).float()
            b = self.b[slot][:self.n * rank].view(self.n, rank).float()
            for range_, (first, end) in enumerate(zip(self.bounds, self.bounds[1:])):
                out[rows, first:end] = x[rows].float() @ a[range_].t() @ b[first:end].t()
        return out


def correctness(results):
    worst, count = 0.0, 0

    def see(out, ref, what, limit, update):
        nonlocal worst, count
        update.shrunk.fill_(float("nan"))
        if update.progress.item() != 0:
            raise SystemExit(f"progress {what}: {update.progress.item()}")
        error = relative_error(out, ref)
        count, worst = count + 1, max(worst, error)
        if not error < limit:
            raise SystemExit(f"WRONG {what}: {error}")

    torch.manual_seed(1)
    shapes = ((96, 72, (24, 72)), (576, 200, (288,)), (960, 576, (576, 768)), (3072, 576, (1536,)), (1024, 4096, ()), (6144, 4096, (4096, 5120)),
              (4096, 14336, ()))
    all_rows = (1, 9, 40) if QUICK else (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 128, 200, 257, 600)
    for n, depth, firsts in shapes[:3] if QUICK else shapes:
        w = (torch.randn(n, depth, device="cuda") / depth ** 0.5).bfloat16()
        for rows in all_rows:
            for ranks, rank_max in (((16,), 16), ((16, 0, 48, 32), 64), ((32, 0, 16, 64) * 10, 64)):
                update = Update(n, depth, firsts, ranks, rank_max, rows)
                adapters = torch.randint(-1, len(ranks), (rows,), device="cuda", dtype=torch.int32)
                if rows > 64:
                    adapters = adapters.sort().values.roll(31).contiguous()
                update.of_rows(adapters)
                x = torch.randn(rows, depth, device="cuda").bfloat16()
                squares = torch.rand(rows, 1, device="cuda") * depth
                scale = torch.rsqrt(squares / depth + 1e-5)
                low = update.reference(x, adapters)
                base = x.float() @ w.float().t()
                what = (n, depth, rows, ranks)
                for pdl in (0, 1):
                    kernels.baton_programmatic_launch(pdl)
                    out = base.bfloat16()
                    update.shrink(x)
                    update.expand(out)
                    see(out, base + low, what + ("expand",), 6e-3, update)
                    if rows > 64:
                        continue
                    more = dict(low_rank=update.struct, squares=squares, squares_count=1, pdl=pdl)
                    for tile in (0, *tiles_of(rows, n, depth)) if tiles_of(rows, n, depth) else ():
                        out = torch.full((rows, n), float("nan"), device="cuda").bfloat16()
                        own(w, x, PLAIN, out, tile, **more)
                        see(out, (base + low) * scale, what + ("plain", tile), 5e-3, update)
                        out = torch.full((rows, n // 2), float("nan"), device="cuda").bfloat16()
                        own(w, x, SILU, out, tile, **more)
                        both = (base + low) * scale
                        see(out, torch.nn.functional.silu(both[:, :n // 2]) * both[:, n // 2:], what + ("silu", tile), 1e-2, update)
                        residual = torch.randn(rows, n, device="cuda")
                        ref = residual + (base + low) * scale
                        own(w, x, RESIDUAL, None, tile, residual=residual, **more)
                        see(residual, ref, what + ("residual", tile), 4e-3, update)
    results.add(part="correctness", checks=count, worst=worst)
    print(f"correctness: {count} checks, worst relative error {worst:.2e}")


class AdapterStep(Step):
    """A step whose rows take turns in having the adapters."""

    def __init__(self, m, rows, length, updates, adapters):
        super().__init__(m, rows, length)
        self.updates = updates
        self.adapters = torch.arange(rows, dtype=torch.int32, device="cuda") % adapters

    def gemm(self, layer, name, x, *arguments, **more):
        update = self.updates[layer][name]
        update.of_rows(self.adapters)
        super().gemm(layer, name, x, *arguments, low_rank=update.struct, **more)


def updates_of(m, rank, rank_max, slots):
    kv = m.kv_heads * m.dim
    ranks = (rank,) * slots
    shared = {"qkv": (m.hidden, (m.heads * m.dim, m.heads * m.dim + kv)), "o": (m.heads * m.dim, ()), "gate_up": (m.hidden, (m.ffn,)),
              "down": (m.ffn, ())}
    return [{name: Update(m.weights[0][name].shape[0], depth, firsts, ranks, rank_max, 64, 0.05) for name, (depth, firsts) in shared.items()}
            for _ in range(m.layers)]


def times(results, best):
    m = Model("8B", 4096)
    tiles = dict.fromkeys(("qkv", "o", "gate_up", "down", "head"), 0)
    for rank, rank_max, slots in ((16, 16, 8), (16, 64, 8), (64, 64, 8)):
        updates = updates_of(m, rank, rank_max, slots)
        each = sum(u.a[0].numel() // rank_max * rank + u.b[0].numel() // rank_max * rank for layer in updates for u in layer.values()) * 2
        graphs, steps = {}, []
        for rows, adapters in ((1, 1), (8, 1), (8, 8), (32, 1), (32, 8), (64, 8)):
            base, step = Step(m, rows, 512), AdapterStep(m, rows, 512, updates, adapters)
            steps.append((base, step))
            graphs[rows, 0] = capture(lambda: base.run(1, tiles))
            graphs[rows, adapters] = capture(lambda: step.run(1, tiles))
        timed = alternate(graphs, 15)
        for (rows, adapters), (mid, low, high) in timed.items():
            ratio = mid / timed[rows, 0][0]
            floor = (m.bytes + m.kv_bytes(rows, 512) + adapters * each) / best / 1e6
            results.add(rows=rows, adapters=adapters, rank=rank, rank_max=rank_max, us=mid, low=low, high=high, ratio=ratio, floor=floor)
            print(f"rank {rank} of {rank_max}, {rows} rows, {adapters} adapters: {mid:.0f} us ({low:.0f} to {high:.0f}), ratio {ratio:.3f}, floor {floor:.0f}")
        del graphs, steps, updates
        torch.cuda.empty_cache()


def main():
    results = Results("low-rank.json")
    correctness(results)
    if not QUICK:
        times(results, float(sys.argv[1]) if len(sys.argv) > 1 else 4.3)


if __name__ == "__main__":
    main()
