"""Checks GEMMs with a weight in FP8 against f64 sums of the stored numbers, and times them at the shapes of Llama-3.1-8B and
Qwen3-32B: with x in bf16 (1 to 32 rows), and with quantized x (1 to 128 rows).

Every launch of a graph reads another copy of the weight, so the L2 cache is cold. Needs libbaton_kernels.so in BATON_KERNELS_DIR.
Writes fp8_gemm.json to OUT. Argument: the peak read bandwidth in TB/s.
"""
import ctypes
import sys

import torch

from harness import Results, alternate, capture, check, stream
from abi import QuantizeArgs, SkinnyArgs
from skinny_gemm import F32, PLAIN, QKV, QUICK, RESIDUAL, SILU, kernels, own

BLOCK = 128


def tile_of(rows, n, depth, epilogue, head_dim=0, block=0):
    a = SkinnyArgs(weight_scales=1, rows=rows, n=n, depth=depth, epilogue=epilogue, head_dim=head_dim, weight_block=block)
    return kernels.baton_skinny_gemm_tile(ctypes.byref(a))


def numbers(n, depth):
    """Returns random FP8 numbers without NaN."""
    bits = torch.randint(0, 256, (n, depth), device="cuda", dtype=torch.uint8)
    return torch.where((bits & 0x7f) == 0x7f, bits - 1, bits).view(torch.float8_e4m3fn)


def scales_of(n, depth, block):
    """Returns tiny, usual and large scales, and the scale of every element."""
    rows, cols = ((n + BLOCK - 1) // BLOCK, (depth + BLOCK - 1) // BLOCK) if block else (n, 1)
    choice = torch.tensor([2.0 ** -30, 0.01, 3.0, 1e-4], device="cuda")
    scales = choice[torch.randint(0, 4, (rows, cols), device="cuda")] * (torch.rand(rows, cols, device="cuda") + 0.5)
    if not block:
        return scales.flatten().contiguous(), scales.double()
    every = scales.double().repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :depth]
    return scales.contiguous(), every


def quantized(x, parts, source=0, width=None, mirror=None, **more):
    """Returns rows of x in FP8, their scales, and the rows as the GEMM sees them."""
    rows, width = x.shape[0], width or x.shape[1]
    stored = (rows + 7) // 8 * 16 if parts == 2 else rows
    out, scales = torch.full((stored, width), 255, device="cuda", dtype=torch.uint8), torch.full((rows,), float("nan"), device="cuda")
    a = QuantizeArgs(x=x.data_ptr(), x_stride=x.stride(0), out=out.data_ptr(), scales=scales.data_ptr(), source=source, rows=rows, width=width,
                     parts=parts, eps=1e-5, mirror=0 if mirror is None else mirror.data_ptr())
    if more.get("x_stride") == 0:
        a.x = 0
    for key, value in more.items():
        setattr(a, key, value.data_ptr() if isinstance(value, torch.Tensor) else value)
    check(kernels.baton_quantize(ctypes.byref(a), stream()), f"quantize {rows} x {width}", kernels)
    seen = out.view(torch.float8_e4m3fn).double()
    if parts == 2:
        high, low = seen.view(-1, 2, 8, width).unbind(1)
        seen = (high + low / 32).reshape(-1, width)[:rows]
    return out, scales, seen * scales.double()[:, None]


class Worst:
    """Keeps the largest error of the results, relative to the sum of the magnitudes of the products of a result."""

    def __init__(self):
        self.error, self.checks = 0.0, 0

    def see(self, out, ref, magnitude, what, limit):
        error = ((out.double() - ref).abs() / (magnitude + 1e-30)).max().item()
        self.error, self.checks = max(self.error, error), self.checks + 1
        if not error < limit:
            raise SystemExit(f"WRONG {what}: {error}")


def inputs(rows, depth):
    """Returns rows with usual, tiny and large elements. Row 0 is zero, and only one element of row 1 is not zero."""
    x = torch.randn(rows, depth, device="cuda")
    x *= 10.0 ** torch.randint(-6, 5, (rows, 1), device="cuda")
    x[:, ::37] *= 1000
    if rows > 2:
        x[0] = 0
        x[1, :-1] = 0
    return x.bfloat16()


def correctness(results):
    worst = Worst()
    shapes = ((96, 592), (256, 512)) if QUICK else ((16, 16), (96, 592), (256, 512), (1008, 144), (4096, 4096), (5120, 2064), (6144, 4096), (28672, 512), (2048, 14336))
    for rows in (2, 9, 32) if QUICK else range(1, 33):
        for n, depth in shapes:
            if rows % 5 and n * depth > 1 << 23:
                continue
            for block in (0, BLOCK) if depth % BLOCK == 0 and n % BLOCK == 0 else (0,):
                w, x, (scales, every) = numbers(n, depth), inputs(rows, depth), scales_of(n, depth, block)
                weight, xd = w.double() * every, x.double()
                ref, magnitude = xd @ weight.t(), xd.abs() @ weight.abs().t()
                more = dict(weight_scales=scales, weight_block=block)
                for pdl in (0, 1):
                    what = (rows, n, depth, block, pdl)
                    if block and not tile_of(rows, n, depth, PLAIN, 0, block):
                        raise SystemExit(f"no kernel for {what}")
                    bias = torch.randn(n, device="cuda")
                    out = torch.full((rows, n), float("nan"), device="cuda").bfloat16()
                    own(w, x, PLAIN, out, pdl=pdl, bias=bias, **more)
                    worst.see(out, ref + bias, magnitude + bias.abs(), what + ("plain",), 6e-3)
                    res, nn = torch.randn(rows, n, device="cuda"), torch.rand(n, device="cuda")
                    tile, before, mirror = tile_of(rows, n, depth, RESIDUAL, 0, block), res.double(), torch.full((rows, n), float("nan"), device="cuda").bfloat16()
                    left = torch.full((rows, (n + tile - 1) // tile), float("nan"), device="cuda")
                    own(w, x, RESIDUAL, None, pdl=pdl, residual=res, mirror=mirror, next_norm=nn, squares_out=left, **more)
                    worst.see(res, before + ref, magnitude + before.abs(), what + ("residual",), 2e-3)
                    worst.see(mirror, res.double() * nn, res.double().abs(), what + ("mirror",), 4e-3)
                    worst.see(left.double().sum(-1), res.double().pow(2).sum(-1), res.double().pow(2).sum(-1), what + ("squares",), 1e-5)
                    if n % 32 == 0:
                        out = torch.full((rows, n // 2), float("nan"), device="cuda").bfloat16()
                        squares = torch.rand(rows, 37, device="cuda") * depth * 1e4
                        own(w, x, SILU, out, pdl=pdl, squares=squares, squares_count=37, **more)
                        factor = torch.rsqrt(squares.double().sum(-1, keepdim=True) / depth + 1e-5)
                        gate, up = (ref * factor).split(n // 2, 1)
                        size = (magnitude * factor).split(n // 2, 1)
                        worst.see(out, torch.nn.functional.silu(gate) * up, size[0] * size[1] + size[1], what + ("silu",), 1e-2)
        heads(worst, rows, 0)
    quantization(worst)
    for rows in (2, 9, 32, 33, 70) if QUICK else (1, 2, 7, 8, 9, 16, 17, 25, 31, 32, 33, 40, 63, 64, 65, 72, 100, 127, 128):
        for parts in (1, 2) if rows <= 32 else (1,):
            for n, depth in ((96, 512), (256, 640)) if QUICK else ((16, 128), (96, 640), (256, 512), (1008, 1152), (4096, 4096), (5120, 2048), (28672, 512), (2048, 14336)):
                quantized_gemms(worst, rows, parts, n, depth)
            heads(worst, rows, parts)
    results.add(part="correctness", checks=worst.checks, worst=worst.error)
    print(f"correctness: {worst.checks} checks, worst relative error {worst.error:.2e}")


def quantization(worst):
    """Checks rows in FP8 against the rows in f64: of bf16 rows, of a norm, and of a gated activation."""
    for rows in (1, 9) if QUICK else (1, 7, 9, 32, 130):
        for width in (64, 4096) if QUICK else (8, 200, 4096, 8192, 14336, 25600):
            for parts in (1, 2):
                # Half the distance between neighbouring FP8 numbers, relative to the larger one, or to the row's largest element.
                limit = 0.063 if parts == 1 else 0.0041
                see = lambda seen, ref, what: worst.see(seen, ref, ref.abs() + ref.abs().amax(1, True) * 2 ** -9, (rows, width, parts, what), limit)
                x = inputs(rows, width)
                see(quantized(x, parts)[2], x.double(), "rows")
                mirror = torch.full((rows, width), float("nan"), device="cuda").bfloat16()
                both = torch.randn(rows, 2 * width, device="cuda").bfloat16()
                gate, up = both.double().split(width, 1)
                ref = torch.nn.functional.silu(gate) * up
                see(quantized(both, parts, 2, width, mirror)[2], ref, "gated")
                worst.see(mirror, ref, ref.abs(), (rows, width, "gated mirror"), 5e-3)
                for adds in (False, True):
                    residual, norm = torch.randn(rows, width, device="cuda") * 3, torch.rand(width, device="cuda") + 0.1
                    stream_of = residual.double() + (x.double() if adds else 0)
                    ref = stream_of * torch.rsqrt(stream_of.pow(2).mean(1, True) + 1e-5) * norm
                    more = {} if adds else dict(x_stride=0)
                    see(quantized(x, parts, 1, None, mirror, residual=residual, norm=norm, **more)[2], ref, "norm")
                    worst.see(mirror, ref, ref.abs(), (rows, width, "norm mirror"), 5e-3)
                    worst.see(residual, stream_of, stream_of.abs(), (rows, width, "residual"), 1e-6)


def quantized_gemms(worst, rows, parts, n, depth):
    """Checks GEMMs with quantized x."""
    limit = 6e-3 if parts == 2 else 8e-3  # with one part, the tensor cores add all products, with about 14 bits
    for pdl in (0, 1):
        w, (scales, every) = numbers(n, depth), scales_of(n, depth, 0)
        data, x_scales, x = quantized(inputs(rows, depth), parts)
        data = data[:rows] if parts == 1 else data
        weight, what = w.double() * every, (rows, parts, n, depth, pdl)
        ref, magnitude = x @ weight.t(), x.abs() @ weight.abs().t()
        ask = lambda epilogue: kernels.baton_skinny_gemm_tile(ctypes.byref(SkinnyArgs(weight_scales=1, rows=rows, n=n, depth=depth, epilogue=epilogue, parts=parts)))
        more = dict(weight_scales=scales, x_scales=x_scales, parts=parts, rows=rows, pdl=pdl)
        if ask(PLAIN):
            bias = torch.randn(n, device="cuda")
            out = torch.full((rows, n), float("nan"), device="cuda").bfloat16()
            own(w, data, PLAIN, out, bias=bias, **more)
            worst.see(out, ref + bias, magnitude + bias.abs(), what + ("plain",), limit)
        if ask(RESIDUAL):
            res = torch.randn(rows, n, device="cuda")
            before, nn, mirror = res.double(), torch.rand(n, device="cuda"), torch.full((rows, n), float("nan"), device="cuda").bfloat16()
            left = torch.full((rows, (n + ask(RESIDUAL) - 1) // ask(RESIDUAL)), float("nan"), device="cuda")
            own(w, data, RESIDUAL, None, residual=res, mirror=mirror, next_norm=nn, squares_out=left, **more)
            worst.see(mirror, res.double() * nn, res.double().abs(), what + ("mirror",), 4e-3)
            worst.see(left.double().sum(-1), res.double().pow(2).sum(-1), res.double().pow(2).sum(-1), what + ("squares",), 1e-5)
            worst.see(res, before + ref, magnitude + before.abs(), what + ("residual",), limit / 3 if parts == 2 else limit)
        if ask(SILU):
            out = torch.full((rows, n // 2), float("nan"), device="cuda").bfloat16()
            own(w, data, SILU, out, **more)
            (gate, up), size = ref.split(n // 2, 1), magnitude.split(n // 2, 1)
            worst.see(out, torch.nn.functional.silu(gate) * up, size[0] * size[1] + size[1], what + ("silu",), 1.2e-2)


def heads(worst, rows, parts):
    """Checks the store of queries, keys and values."""
    for qh, kvh, dim, depth in ((9, 3, 64, 640), (4, 2, 128, 1024)):
        n = (qh + 2 * kvh) * dim
        w, x, (scales, every) = numbers(n, depth), inputs(rows, depth), scales_of(n, depth, 0)
        freq = 500000.0 ** (-torch.arange(0, dim // 2, device="cuda").float() / (dim // 2))
        pos, dest = torch.randint(0, 9000, (rows,), device="cuda", dtype=torch.int32), torch.randperm(40 * 16, device="cuda")[:rows].int()
        weight, data, more = w.double() * every, x, {}
        if parts:
            data, x_scales, x = quantized(x, parts)
            more = dict(x_scales=x_scales, parts=parts, rows=rows)
        view = lambda y: y.view(rows, qh + 2 * kvh, dim)
        y, size = view(x.double() @ weight.t()), view(x.double().abs() @ weight.abs().t())
        ang = (pos.float()[:, None] * freq).double()[:, None]
        turn = lambda y, a, b: torch.cat([torch.cat([y[:, :-kvh, :dim // 2] * a - y[:, :-kvh, dim // 2:] * b, y[:, :-kvh, dim // 2:] * a + y[:, :-kvh, :dim // 2] * b], -1), y[:, -kvh:]], 1)
        y, size = turn(y, ang.cos(), ang.sin()), turn(size, ang.cos().abs(), -ang.sin().abs()).abs() + size
        kv = torch.full((40, 2, kvh, 16, dim), float("nan"), device="cuda").bfloat16()
        out = torch.full((rows, qh * dim), float("nan"), device="cuda").bfloat16()
        own(w, data, QKV, out, **more, weight_scales=scales, k=kv[0, 0], v=kv[0, 1], stride_block=kv.stride(0), stride_head=kv.stride(2), stride_token=kv.stride(3),
            frequencies=freq, positions=pos, destinations=dest, query_heads=qh, kv_heads=kvh, head_dim=dim)
        worst.see(out.view(rows, qh, dim), y[:, :qh], size[:, :qh], (rows, dim, "queries"), 8e-3)
        for r in range(rows):
            at = dest[r].item()
            for half in range(2):
                part = slice(qh + half * kvh, qh + (half + 1) * kvh)
                worst.see(kv[at // 16, half, :, at % 16], y[r, part], size[r, part], (rows, dim, "keys and values"), 8e-3)


SHAPES = {
    "8B qkv": (6144, 4096, PLAIN), "8B o": (4096, 4096, RESIDUAL), "8B gate_up": (28672, 4096, SILU), "8B down": (4096, 14336, RESIDUAL),
    "32B qkv": (10240, 5120, PLAIN), "32B o": (5120, 8192, RESIDUAL), "32B gate_up": (51200, 5120, SILU), "32B down": (5120, 25600, RESIDUAL),
}


def quantize_again(x, data, scales, parts):
    a = QuantizeArgs(x=x.data_ptr(), x_stride=x.stride(0), out=data.data_ptr(), scales=scales.data_ptr(), rows=x.shape[0], width=x.shape[1], parts=parts)
    check(kernels.baton_quantize(ctypes.byref(a), stream()), "quantize", kernels)


def speed(results, best):
    kernels.baton_programmatic_launch(1)
    arena = numbers(1 << 15, 1 << 16).flatten()
    for name, (n, depth, epilogue) in SHAPES.items():
        copies = max(2, min(24, arena.numel() // (n * depth)))
        w = [arena[i * n * depth:(i + 1) * n * depth].view(n, depth) for i in range(copies)]
        scales, floor, line = torch.full((n,), 1e-3, device="cuda"), n * depth / best / 1e6, []
        for rows in (1, 8, 16, 32, 64, 128):
            x = torch.randn(rows, depth, device="cuda").bfloat16()
            out = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
            res, left, nn = torch.zeros(rows, n, device="cuda"), torch.empty(rows, n // 16, device="cuda"), torch.ones(n, device="cuda")
            more = dict(weight_scales=scales)
            if epilogue == RESIDUAL:
                more |= dict(residual=res, mirror=out, next_norm=nn, squares_out=left)
            else:
                more |= dict(squares=left, squares_count=128)
            graphs, kept = {}, []
            if rows <= 32:
                graphs["fp8"] = capture(lambda: [own(w[i], x, epilogue, out, 0, 1, **more) for i in range(copies)])
            for parts in (1, 2) if rows <= 32 else (1,):
                data, x_scales, _ = quantized(x, parts)
                kept.append((data, x_scales))  # keeps the memory until the graphs have run
                of_parts = dict(more, x_scales=x_scales, parts=parts, rows=rows, squares=0)
                graphs[f"quantized, {parts} parts"] = capture(lambda: [own(w[i], data, epilogue, out, 0, 1, **of_parts) for i in range(copies)])
                each = lambda i: (quantize_again(x, data, x_scales, parts), own(w[i], data, epilogue, out, 0, 1, **of_parts))
                graphs[f"with quantization, {parts} parts"] = capture(lambda: [each(i) for i in range(copies)])
            if rows <= 16:
                graphs["skinny"] = capture(lambda: [own(w[i], x, epilogue, out, 16, 1, **more) for i in range(copies)])
            for case, (mid, lo, hi) in alternate(graphs, 5).items():
                us = mid / copies
                results.add(part="speed", shape=name, n=n, depth=depth, rows=rows, case=case, us=us, low=lo / copies, high=hi / copies, fraction_of_peak=floor / us)
                line.append(f"{case} {rows}: {us:.1f}")
        print(f"{name:11s} floor {floor:6.2f}: " + ", ".join(line), flush=True)


if __name__ == "__main__":
    res = Results("fp8_gemm.json")
    correctness(res)
    if not QUICK:
        speed(res, float(sys.argv[1]) if len(sys.argv) > 1 else 4.55)
