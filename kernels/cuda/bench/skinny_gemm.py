"""Checks skinny GEMMs (1 to 128 rows) against f32, then compares them with torch.mm (cuBLAS) at the shapes of Llama-3.2-1B and
3.1-8B.

Every launch of a graph reads another copy of the weight, so the L2 cache is cold. Needs libbaton_kernels.so in BATON_KERNELS_DIR.
Writes gemm.json to OUT. Argument: the peak read bandwidth in TB/s.
"""
import ctypes
import sys

import torch

from harness import Results, alternate, capture, check, load_kernels, relative_error, stream
from abi import SkinnyArgs

kernels = load_kernels()
PLAIN, RESIDUAL, SILU, F32, QKV = range(5)
QUICK = "--quick" in sys.argv  # only correctness, with few shapes, for compute-sanitizer


def own(w, x, epilogue, out=None, tile=0, pdl=0, grid=0, **more):
    a = SkinnyArgs(weight=w.data_ptr(), x=x.data_ptr(), x_stride=x.stride(0), rows=x.shape[0], n=w.shape[0], depth=w.shape[1], epilogue=epilogue,
             tile=tile, pdl=pdl, grid=grid, eps=1e-5)
    if out is not None:
        a.out, a.out_stride = out.data_ptr(), out.stride(0)
    for key, value in more.items():
        setattr(a, key, value.data_ptr() if isinstance(value, torch.Tensor) else value)
    check(kernels.baton_skinny_gemm(ctypes.byref(a), stream()), f"skinny gemm {tuple(w.shape)}, epilogue {epilogue}, tile {tile}", kernels)


def tile_of(w, rows):
    """Returns the weight rows per tile that RESIDUAL chooses."""
    a = SkinnyArgs(rows=rows, n=w.shape[0], depth=w.shape[1], epilogue=RESIDUAL)
    return kernels.baton_skinny_gemm_tile(ctypes.byref(a))


def tiles_of(rows, n, depth, epilogue=PLAIN, head_dim=0):
    """Returns the tiles that a GEMM accepts."""
    ask = lambda t: kernels.baton_skinny_gemm_tile(ctypes.byref(SkinnyArgs(rows=rows, n=n, depth=depth, epilogue=epilogue, head_dim=head_dim, tile=t)))
    return [t for t in (16, 32, 64, 112, 128, 224) if ask(t) == t]


def correctness(results):
    torch.manual_seed(int.from_bytes(__import__("os").urandom(4), "little"))
    worst, n = 0.0, 0

    def see(out, ref, what, limit=6e-3):
        nonlocal worst, n
        err = relative_error(out, ref)
        n += 1
        worst = max(worst, err)
        if not err < limit:
            print("WRONG", what, err)
            raise SystemExit(1)

    # Above 16 rows, the depth must be a multiple of 64, and the number of weight rows a multiple of 16.
    few = ((96, 576), (1000, 1032)), ((96, 576), (1008, 1024))
    many = ((48, 32), (96, 576), (1024, 2048), (4096, 896), (2560, 4096), (1000, 14336), (3072, 544), (640, 1032), (48, 8), (6144, 4096)), \
           ((48, 64), (96, 576), (1024, 2048), (4096, 896), (2560, 4096), (1008, 14336), (3072, 512), (16, 192), (28672, 512))
    for rows in (2, 9, 17, 40, 70) if QUICK else (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 64, 65, 72, 100, 128):
        for n_out, depth in (few if QUICK else many)[rows > 16]:
            w = (torch.randn(n_out, depth, device="cuda") / depth ** 0.5).bfloat16()
            x = (torch.randn(rows, depth, device="cuda") * 3).bfloat16()
            g = torch.rand(depth, device="cuda") + 0.5
            bias = torch.randn(n_out, device="cuda")
            xf = x.float()
            normed = xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + 1e-5) * g
            weighed = (xf * g).bfloat16()
            squares = (xf.pow(2).sum(-1, keepdim=True) * torch.softmax(torch.randn(rows, 37, device="cuda"), -1)).contiguous()
            # Above 64 rows, only SILU, RESIDUAL and QKV have tiles.
            plain, gated, added = (tiles_of(rows, n_out, depth, epilogue) for epilogue in (PLAIN, SILU, RESIDUAL))
            for tile in sorted({*gated, *added}):
                for pdl in (0, 1):
                    for norm in (False, True):
                        ref = (normed if norm else xf) @ w.float().t()
                        xx = weighed if norm else x
                        more = dict(pdl=pdl, squares=squares, squares_count=37) if norm else dict(pdl=pdl)
                        what = (rows, n_out, depth, tile, pdl, norm)
                        if tile in plain:
                            out = torch.full((rows, n_out), float("nan"), device="cuda").bfloat16()
                            own(w, xx, PLAIN, out, tile, bias=bias, **more)
                            see(out, ref + bias, what + ("plain",))
                            out = torch.full((rows, n_out), float("nan"), device="cuda")
                            own(w, xx, F32, out, tile, grid=5, **more)
                            see(out, ref, what + ("f32",))
                        if tile not in gated:
                            continue
                        out = torch.full((rows, n_out // 2), float("nan"), device="cuda").bfloat16()
                        own(w, xx, SILU, out, tile, **more)
                        see(out, torch.nn.functional.silu(ref[:, :n_out // 2]) * ref[:, n_out // 2:], what + ("silu",), 1e-2)
                    if tile not in added:
                        continue
                    res, nn = torch.randn(rows, n_out, device="cuda"), torch.rand(n_out, device="cuda")
                    start, mirror = res.clone(), torch.full((rows, n_out), float("nan"), device="cuda").bfloat16()
                    left = torch.full((rows, (n_out + tile - 1) // tile), float("nan"), device="cuda")
                    own(w, x, RESIDUAL, None, tile, residual=res, mirror=mirror, next_norm=nn, squares_out=left, pdl=pdl)
                    ref = start + xf @ w.float().t()
                    see(res, ref, what + ("residual",), 1e-5 if rows <= 8 else 4e-5)
                    see(mirror, ref * nn, what + ("mirror",))
                    see(left.sum(-1), ref.pow(2).sum(-1), what + ("squares",), 1e-5 if rows <= 8 else 4e-5)
        for qh, kvh, dim, depth in ((9, 3, 64, 576),) if QUICK else ((32, 8, 128, 4096), (32, 8, 64, 2048), (9, 3, 64, 576), (14, 2, 64, 896)):
            n_out = (qh + 2 * kvh) * dim
            w = (torch.randn(n_out, depth, device="cuda") / depth ** 0.5).bfloat16()
            x = torch.randn(rows, depth, device="cuda").bfloat16()
            g, bias = torch.rand(depth, device="cuda") + 0.5, torch.randn(n_out, device="cuda")
            freq = 500000.0 ** (-torch.arange(0, dim // 2, device="cuda").float() / (dim // 2))
            pos = torch.randint(0, 9000, (rows,), device="cuda", dtype=torch.int32)
            dest = torch.randperm(40 * 16, device="cuda")[:rows].int()
            if rows > 1:
                dest[-1] = -1
            xf = x.float()
            y = (xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + 1e-5) * g) @ w.float().t() + bias
            y = y.view(rows, qh + 2 * kvh, dim)
            ang = pos.float()[:, None] * freq
            cs, sn = ang.double().cos().float()[:, None], ang.double().sin().float()[:, None]
            a, b = y[:, :qh + kvh, :dim // 2], y[:, :qh + kvh, dim // 2:]
            y = torch.cat([torch.cat([a * cs - b * sn, b * cs + a * sn], -1), y[:, qh + kvh:]], 1)
            xx, squares = (xf * g).bfloat16(), xf.pow(2).sum(-1, keepdim=True).contiguous()
            for tile in {0, *tiles_of(rows, n_out, depth, QKV, dim)}:
                kv = torch.full((40, 2, 2, kvh, 16, dim), float("nan"), device="cuda").bfloat16()
                out = torch.full((rows, qh * dim), float("nan"), device="cuda").bfloat16()
                own(w, xx, QKV, out, tile, squares=squares, squares_count=1, bias=bias, k=kv[0, 1, 0], v=kv[0, 1, 1], stride_block=kv.stride(0), stride_head=kv.stride(3),
                    stride_token=kv.stride(4), frequencies=freq, positions=pos, destinations=dest, query_heads=qh, kv_heads=kvh, head_dim=dim)
                see(out, y[:, :qh].reshape(rows, -1), (rows, qh, dim, tile, "queries"))
                stored = 0
                for r in range(rows):
                    d = dest[r].item()
                    if d >= 0:
                        see(kv[d // 16, 1, 0, :, d % 16], y[r, qh:qh + kvh], (rows, qh, dim, tile, "keys"))
                        see(kv[d // 16, 1, 1, :, d % 16], y[r, qh + kvh:], (rows, qh, dim, tile, "values"))
                        stored += 2 * kvh * dim
                assert (~kv.isnan()).sum().item() == stored, "a row was stored elsewhere"
    results.add(part="correctness", checks=n, worst=worst)
    print(f"correctness: {n} checks, worst relative error {worst:.2e}")


SHAPES = {
    "1B qkv": (3072, 2048), "1B o": (2048, 2048), "1B gate_up": (16384, 2048), "1B down": (2048, 8192), "1B lm_head": (128256, 2048),
    "8B qkv": (6144, 4096), "8B o": (4096, 4096), "8B gate_up": (28672, 4096), "8B down": (4096, 14336), "8B lm_head": (128256, 4096),
}


def speed(results, best, only=None):
    arena = torch.empty(3 << 29, dtype=torch.bfloat16, device="cuda")
    arena.normal_()
    arena.mul_(0.02)
    for name, (n, depth) in SHAPES.items():
        copies = max(2, min(40, arena.numel() // (n * depth)))
        w = [arena[i * n * depth:(i + 1) * n * depth].view(n, depth) for i in range(copies)]
        floor = n * depth * 2 / best / 1e6
        for rows in (1, 8, 16, 32, 64, 128):
            x = torch.randn(rows, depth, device="cuda").bfloat16()
            out = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)

            def peer():
                for i in range(copies):
                    torch.mm(x, w[i].t(), out=out)
            graphs = {"cublas": capture(peer)}
            for tile, pdl in ((0, 0), (0, 1), *((t, 1) for t in tiles_of(rows, n, depth))) if rows <= 64 else ():
                graphs[f"own {tile}" + (" pdl" if pdl else "")] = capture(lambda: [own(w[i], x, PLAIN, out, tile, pdl) for i in range(copies)])
            # Times the epilogues that gate_up and lm_head have in a step, at row counts of wide_gemm.cu.
            if rows >= 32 and name.endswith(("gate_up", "lm_head")):
                is_gated = name.endswith("gate_up")
                label, epilogue = ("silu", SILU) if is_gated else ("f32", F32)
                to = torch.empty(rows, n // 2, device="cuda", dtype=torch.bfloat16) if is_gated else torch.empty(rows, n, device="cuda")
                for tile in tiles_of(rows, n, depth, epilogue):
                    graphs[f"{label} {tile}"] = capture(lambda: [own(w[i], x, epilogue, to, tile, 1) for i in range(copies)])
            timed = alternate(graphs, 9)
            line = []
            for case, (mid, lo, hi) in timed.items():
                us = mid / copies
                results.add(part="speed", shape=name, n=n, depth=depth, rows=rows, case=case, us=us, low=lo / copies, high=hi / copies, fraction_of_peak=floor / us)
                line.append(f"{case} {us:.2f} ({100 * floor / us:.0f} %)")
            print(f"{name:11s} M={rows:2d} floor {floor:6.2f}: " + ", ".join(line))


if __name__ == "__main__":
    res = Results("gemm.json")
    correctness(res)
    if not QUICK:
        speed(res, float(sys.argv[1]) if len(sys.argv) > 1 else 4.3)
