"""Checks low-rank updates (LoRA) against f32, then measures a decode step of an 8B model with adapters on all matrices, beside the same
step without adapters, in CUDA graphs with programmatic dependent launch.

Needs libbaton_kernels.so in BATON_KERNELS_DIR. Writes low-rank.json to OUT. Arguments: the peak read bandwidth in TB/s, --correctness for
no times, and --quick for a few checks that compute-sanitizer can run.
"""
import ctypes
import sys
import time

import torch

from harness import Results, alternate, capture, check, relative_error, stream
from abi import LowRank
from decode_chain import Model, Step
from skinny_gemm import PLAIN, QKV, RESIDUAL, SILU, kernels, own, tiles_of

QUICK = "--quick" in sys.argv
CORRECTNESS = QUICK or "--correctness" in sys.argv


def new_scratch(count):
    """Returns memory for x A^T, and the progress of a GEMM."""
    return torch.full((count,), float("nan"), device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")


class Update:
    """Adapters of the given ranks for a matrix of n outputs, whose ranges start at 0 and `firsts`."""

    def __init__(self, n, depth, firsts, ranks, rank_max, rows, scale=1.0, scratch=None):
        self.n, self.depth, self.bounds, self.ranks = n, depth, [0, *firsts, n], ranks
        new = lambda *shape: torch.randn(*shape, device="cuda").mul_(scale).bfloat16()
        ranges = len(firsts) + 1
        self.a = new(len(ranks), ranges * rank_max * depth).mul_(1 / depth ** 0.5)
        self.b = new(len(ranks), n * rank_max)
        self.device_ranks = torch.tensor(ranks, dtype=torch.int32, device="cuda")
        self.shrunk, self.progress = scratch or new_scratch(max(rows, 1024) * ranges * rank_max)
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


class Checks:
    def __init__(self):
        self.worst, self.count = 0.0, 0

    def see(self, out, ref, what, limit, update):
        """Compares a result, and checks that the GEMM has left its scratch memory for the next one."""
        error, left = relative_error(out, ref), update.progress.item()
        self.count, self.worst = self.count + 1, max(self.worst, error)
        if left != 0 or not error < limit:
            raise SystemExit(f"WRONG {what}: error {error}, progress {left}")
        update.shrunk.fill_(float("nan"))


def adapters_of(rows, slots):
    """Returns random adapters of rows, -1 for none. The first row has the first adapter."""
    adapters = torch.randint(-1, slots, (rows,), device="cuda", dtype=torch.int32)
    adapters[0] = 0
    return adapters if rows <= 64 else adapters.sort().values.roll(31).contiguous()


def weight_of(n, depth):
    return (torch.randn(n, depth, device="cuda") / depth ** 0.5).bfloat16()


def random_rows(rows, depth):
    """Returns x, its squares, and the scales that follow from them."""
    squares = torch.rand(rows, 1, device="cuda") * depth
    return torch.randn(rows, depth, device="cuda").bfloat16(), squares, torch.rsqrt(squares / depth + 1e-5)


RANKS = (((16,), 16), ((128, 0, 48, 32), 128), ((32, 0, 16, 64) * 10, 64))  # ranks of the slots, and rank_max


def correctness(checks):
    # The results of 72 outputs end within a tile of 16.
    shapes = ((72, 200, ()), (96, 72, (24, 72)), (576, 200, (288,)), (960, 576, (576, 768)), (3072, 576, (1536,)), (1024, 4096, ()),
              (6144, 4096, (4096, 5120)), (4096, 14336, ()))
    all_rows = (1, 9, 16, 40) if QUICK else (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 128, 200, 257, 600)
    for n, depth, firsts in shapes[:4] if QUICK else shapes:
        w = weight_of(n, depth)
        for rows in all_rows:
            for ranks, rank_max in RANKS:
                update, adapters = Update(n, depth, firsts, ranks, rank_max, rows), adapters_of(rows, len(ranks))
                update.of_rows(adapters)
                x, squares, scale = random_rows(rows, depth)
                low, base = update.reference(x, adapters), x.float() @ w.float().t()
                both = (base + low) * scale
                silu = torch.nn.functional.silu(both[:, :n // 2]) * both[:, n // 2:]
                new = lambda width: torch.full((rows, width), float("nan"), device="cuda").bfloat16()
                for pdl in (0, 1):
                    what = (n, depth, rows, ranks, pdl)
                    kernels.baton_programmatic_launch(pdl)
                    out = base.bfloat16()
                    update.shrink(x)
                    update.expand(out)
                    checks.see(out, base + low, what + ("expand",), 6e-3, update)
                    if rows > 64:
                        continue
                    more = dict(low_rank=update.struct, squares=squares, squares_count=1, pdl=pdl)
                    for tile in (0, *tiles_of(rows, n, depth)) if tiles_of(rows, n, depth) else ():
                        own(w, x, PLAIN, out := new(n), tile, **more)
                        checks.see(out, both, what + ("plain", tile), 5e-3, update)
                        own(w, x, SILU, out := new(n // 2), tile, **more)
                        checks.see(out, silu, what + ("silu", tile), 1e-2, update)
                        residual = torch.randn(rows, n, device="cuda")
                        ref = residual + both
                        own(w, x, RESIDUAL, None, tile, residual=residual, **more)
                        checks.see(residual, ref, what + ("residual", tile), 4e-3, update)


def grids_and_heads(checks):
    """Checks QKV, with fewer CTAs than SMs, one for each SM, and more CTAs than the SMs hold at a time."""
    for query_heads, kv_heads, dim, depth in ((9, 3, 64, 576),) if QUICK else ((9, 3, 64, 576), (32, 8, 128, 4096)):
        queries, kv_width = query_heads * dim, kv_heads * dim
        n = queries + 2 * kv_width
        w, bias = weight_of(n, depth), torch.randn(n, device="cuda")
        for rows in (1, 16, 40) if QUICK else (1, 8, 9, 16, 17, 40, 64):
            for ranks, rank_max in RANKS:
                update, adapters = Update(n, depth, (queries, queries + kv_width), ranks, rank_max, rows), adapters_of(rows, len(ranks))
                x, squares, scale = random_rows(rows, depth)
                ref = (x.float() @ w.float().t() + update.reference(x, adapters)) * scale + bias
                dest = torch.randperm(8 * 16, device="cuda")[:rows].int()
                for tile in (0, *tiles_of(rows, n, depth, QKV, dim)):
                    for grid in (0, 5, 500):
                        kv = torch.full((8, 2, kv_heads, 16, dim), float("nan"), device="cuda").bfloat16()
                        out = torch.full((rows, queries), float("nan"), device="cuda").bfloat16()
                        own(w, x, QKV, out, tile, int(grid > 0), grid, low_rank=update.of_rows(adapters), squares=squares, squares_count=1, bias=bias,
                            k=kv[0, 0], v=kv[0, 1], stride_block=kv.stride(0), stride_head=kv.stride(2), stride_token=kv.stride(3), destinations=dest,
                            query_heads=query_heads, kv_heads=kv_heads, head_dim=dim)
                        stored = kv[dest.long() // 16, :, :, dest.long() % 16].reshape(rows, 2 * kv_width)
                        checks.see(torch.cat([out, stored], 1), ref, ("qkv", n, depth, rows, ranks, tile, grid), 5e-3, update)


class Sequence:
    """GEMMs of several shapes and rows, one after another, with the same scratch memory."""

    SHAPES = ((4096, 4096, ()), (960, 576, (576, 768)), (1024, 2048, (512,)), (6144, 4096, (4096, 5120)))

    def __init__(self):
        scratch, self.items, self.outs = new_scratch(1024 * 3 * 128), [], []
        for rows in (1, 40, 16) if QUICK else (1, 40, 16, 64, 9):
            for i, (n, depth, firsts) in enumerate(self.SHAPES[1:3] if QUICK else self.SHAPES):
                ranks, rank_max = RANKS[(i + rows) % len(RANKS)]
                update = Update(n, depth, firsts, ranks, rank_max, rows, scratch=scratch)
                w, x, adapters = weight_of(n, depth), random_rows(rows, depth)[0], adapters_of(rows, len(ranks))
                self.items.append((w, x, update, adapters, x.float() @ w.float().t() + update.reference(x, adapters)))
                self.outs.append(torch.empty(rows, n, device="cuda").bfloat16())

    def run(self, pdl):
        for (w, x, update, adapters, _), out in zip(self.items, self.outs):
            own(w, x, PLAIN, out, 0, pdl, low_rank=update.of_rows(adapters))

    def see(self, checks, what):
        for (w, _, update, _, ref), out in zip(self.items, self.outs):
            checks.see(out, ref, what + (tuple(w.shape), len(out)), 5e-3, update)
            out.fill_(float("nan"))


# Each CTA takes the shared memory of an SM, says at started[CTA] that it runs, and runs until *release is not 0.
HOLD = """
.version 7.0
.target sm_80
.address_size 64
.visible .entry hold(.param .u64 release, .param .u64 started)
{
  .reg .u64 %address, %place;
  .reg .u32 %cta, %value;
  .reg .pred %waits;
  ld.param.u64 %place, [started];
  mov.u32 %cta, %ctaid.x;
  mad.wide.u32 %place, %cta, 4, %place;
  mov.u32 %value, 1;
  st.volatile.global.u32 [%place], %value;
  ld.param.u64 %address, [release];
again:
  ld.volatile.global.u32 %value, [%address];
  setp.eq.u32 %waits, %value, 0;
  @%waits bra again;
  ret;
}
"""
SHARED_BYTES, MAX_DYNAMIC_SHARED = 200 << 10, 8


class HeldSms:
    """Another kernel, on a stream of its own, that holds all but `free` SMs until `release`."""

    def __init__(self, free):
        held = torch.cuda.get_device_properties(0).multi_processor_count - free
        # Memory of the host: the release needs no SM.
        self.flags, self.stream = torch.zeros(1 + held, dtype=torch.int32).pin_memory(), torch.cuda.Stream()
        driver, module, kernel = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
        check(driver.cuModuleLoadData(ctypes.byref(module), HOLD.encode()), "cuModuleLoadData")
        check(driver.cuModuleGetFunction(ctypes.byref(kernel), module, b"hold"), "cuModuleGetFunction")
        check(driver.cuFuncSetAttribute(kernel, MAX_DYNAMIC_SHARED, SHARED_BYTES), "cuFuncSetAttribute")
        arguments = [ctypes.c_uint64(self.flags.data_ptr()), ctypes.c_uint64(self.flags.data_ptr() + 4)]
        pointers = (ctypes.c_void_p * 2)(*[ctypes.addressof(argument) for argument in arguments])
        check(driver.cuLaunchKernel(kernel, held, 1, 1, 1, 1, 1, SHARED_BYTES, ctypes.c_void_p(self.stream.cuda_stream), pointers, None),
              "cuLaunchKernel")
        if not within(10, lambda: bool(self.flags[1:].all())):
            self.release()
            raise SystemExit(f"cannot hold {held} SMs")

    def release(self):
        self.flags[0] = 1
        self.stream.synchronize()


def within(seconds, is_true):
    end = time.monotonic() + seconds
    while not is_true() and time.monotonic() < end:
        time.sleep(1e-3)
    return is_true()


def few_sms(checks, sequence):
    """Checks GEMMs with more CTAs than the SMs that another kernel leaves: they end while that kernel runs."""
    for free in (1, 4):
        for pdl in (0, 1):
            torch.cuda.synchronize()
            held, done = HeldSms(free), torch.cuda.Event()
            sequence.run(pdl)
            done.record()
            has_ended = within(20, done.query)
            held.release()
            torch.cuda.synchronize()
            sequence.see(checks, ("few SMs", free, pdl))
            if not has_ended:
                raise SystemExit(f"WRONG few SMs, {free} free, pdl {pdl}: a GEMM waits for CTAs that do not run")


def sequences(checks):
    """Checks GEMMs without a wait of the host between them, in a stream and in graphs, and with few free SMs."""
    sequence = Sequence()
    for pdl in (0, 1):
        for _ in range(5):
            sequence.run(pdl)
        sequence.see(checks, ("sequence", pdl))
    if QUICK:
        return
    graphs = [capture(lambda: sequence.run(pdl)) for pdl in (0, 1)]
    for turn in range(20):
        for pdl in (1, 1, 0, 1):
            graphs[pdl].replay()
        sequence.see(checks, ("graphs", turn))
    few_sms(checks, sequence)


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
    results, checks = Results("low-rank.json"), Checks()
    torch.manual_seed(1)
    for part in (sequences, grids_and_heads, correctness):
        part(checks)
        print(f"{part.__name__}: {checks.count} checks so far, worst relative error {checks.worst:.2e}", flush=True)
    results.add(part="correctness", checks=checks.count, worst=checks.worst)
    if not CORRECTNESS:
        times(results, float(sys.argv[1]) if len(sys.argv) > 1 else 4.3)


if __name__ == "__main__":
    main()
