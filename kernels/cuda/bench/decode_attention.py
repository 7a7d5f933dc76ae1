"""Decode attention: peak read bandwidth, correctness, block-major against contiguous pages, Baton against FlashInfer.

Needs libbaton_kernels.so, libpeak_read.so, libpeer.so in BATON_KERNELS_DIR (see README.md in this folder), PyTorch and one GPU.
Writes attention.json to OUT.
"""
import ctypes
import math
import sys

import torch

from harness import Results, alternate, capture, check, load, load_kernels, ptr, relative_error, stream
from abi import BF16, DecodeArgs

kernels = load_kernels()
i32, i64, f32 = ctypes.c_int32, ctypes.c_int64, ctypes.c_float
PAGE = 16
QUICK = "--quick" in sys.argv  # only correctness, with few cases, for compute-sanitizer
if not QUICK:
    peak, peer = load("libpeak_read.so"), load("libpeer.so")
results = Results("attention.json")
SMS = torch.cuda.get_device_properties(0).multi_processor_count


def own(q, k, v, strides, pages, indptr, lens, out, kv_heads, group, dim, window, part, counters, grid, pdl=0):
    args = DecodeArgs(q.data_ptr(), q.stride(0), k, v, *strides, pages.data_ptr(), indptr.data_ptr(), lens.data_ptr(), out.data_ptr(), out.stride(0),
                      part.data_ptr(), counters.data_ptr(), q.shape[0], kv_heads, group, dim, window, 1 / math.sqrt(dim), grid, pdl, 0, BF16)
    check(kernels.baton_decode_attention(ctypes.byref(args), stream()), f"decode attention, grid {grid}", kernels)


def measure_peak():
    buf = torch.empty(6 << 30, dtype=torch.uint8, device="cuda")
    buf.view(torch.int32).random_()
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    other = torch.empty_like(buf)
    n = buf.numel()
    cases = {}
    for per in (2, 4):
        for unroll in (4, 8):
            cases[f"loads x{unroll}, {per} blocks of 512 an SM"] = capture(lambda: check(
                peak.peak_read_loads(ptr(buf), i64(n), ptr(sink), i32(SMS * per), i32(unroll), stream()), "peak read"))
    for grid in (SMS, 128, 96, 64):
        cases[f"bulk 16 KB, {grid} blocks"] = capture(lambda: check(
            peak.peak_read_bulk(ptr(buf), i64(n), i32(grid), i32(16384), stream()), "peak read"))
    for piece in (256, 512, 1024, 4096):
        cases[f"bulk {piece} B, {SMS} blocks"] = capture(lambda: check(
            peak.peak_read_bulk(ptr(buf), i64(n), i32(SMS), i32(piece), stream()), "peak read"))
    cases["copy"] = capture(lambda: other.copy_(buf))
    best = 0
    for name, (mid, lo, hi) in alternate(cases, 9).items():
        rate = n * (2 if name == "copy" else 1) / mid / 1e6
        if name != "copy":
            best = max(best, rate)
        results.add(part="peak", case=name, us=mid, low=lo, high=hi, tb_s=rate)
        print(f"peak {name:36s} {rate:6.3f} TB/s")
    return best


def correctness():
    worst = 0.0
    torch.manual_seed(int.from_bytes(__import__("os").urandom(4), "little"))
    lens_list = [1, 15, 16, 17, 0, 33, 255, 256, 257, 1000, 4095, 4096, 4097, 0, 2, 31, 700]
    cases = []
    for dim in (64, 128):
        for group in range(1, 9):
            cases.append((dim, group, 8, 0, lens_list))
        cases.append((dim, 4, 8, 100, lens_list))
        cases.append((dim, 3, 3, 0, lens_list))
        cases.append((dim, 7, 2, 333, lens_list))
        cases.append((dim, 4, 8, 0, [8192]))
        cases.append((dim, 4, 8, 0, [1]))
        cases.append((dim, 4, 8, 0, [0, 0]))
        cases.append((dim, 1, 32, 0, [100, 3, 0, 512]))
        cases.append((dim, 4, 8, 0, torch.randint(0, 700, (300,)).tolist()))
        # Four heads per CTA: these rows have just fewer groups of four heads than an H200 has CTAs.
        cases.append((dim, 4, 8, 0, [617] * 128))
        cases.append((dim, 7, 8, 100, torch.randint(0, 700, (125,)).tolist()))
        cases.append((dim, 2, 4, 500, torch.randint(590, 640, (250,)).tolist()))
    if QUICK:
        cases = [(d, g, 8, w, [1, 15, 16, 17, 0, 700, 33]) for d in (64, 128) for g, w in ((4, 0), (7, 100))]
    n = 0
    for dim, group, heads, window, lens_l in cases:
        rows, layers, layer = len(lens_l), 2, 1
        need = [(x + PAGE - 1) // PAGE for x in lens_l]
        blocks = sum(need) + 5
        # All KV outside the rows' tokens is NaN.
        pool = torch.full((blocks, layers, 2, heads, PAGE, dim), float("nan"), dtype=torch.bfloat16, device="cuda")
        perm = torch.randperm(blocks)
        pages, indptr = [], [0]
        q = torch.randn(rows, heads * group, dim, device="cuda").bfloat16()
        ref = torch.zeros(rows, heads * group, dim, device="cuda")
        at = 0
        for r, ln in enumerate(lens_l):
            ids = perm[at:at + need[r]]
            at += need[r]
            pages += ids.tolist()
            indptr.append(len(pages))
            if ln == 0:
                continue
            kv = torch.randn(2, heads, need[r] * PAGE, dim, device="cuda").bfloat16()
            kv[:, :, ln:] = float("nan")
            pool[ids.cuda(), layer] = kv.view(2, heads, need[r], PAGE, dim).permute(2, 0, 1, 3, 4)
            lo = max(0, ln - window) if window else 0
            k, v = kv[0, :, lo:ln].float(), kv[1, :, lo:ln].float()
            s = torch.einsum("hgd,htd->hgt", q[r].float().view(heads, group, dim), k) / math.sqrt(dim)
            ref[r] = torch.einsum("hgt,htd->hgd", s.softmax(-1), v).reshape(heads * group, dim)
        lens = torch.tensor(lens_l, dtype=torch.int32, device="cuda")
        pages, indptr = torch.tensor(pages + [0], dtype=torch.int32).cuda(), torch.tensor(indptr, dtype=torch.int32).cuda()
        counters = torch.zeros(rows * heads, dtype=torch.int32, device="cuda")
        part = torch.full((1 << 24,), float("nan"), device="cuda")
        strides = (pool.stride(0), pool.stride(3), pool.stride(4))
        for grid in (0, 7):
            outs = []
            for _ in range(2):
                out = torch.full_like(q, float("nan"))
                own(q, ptr(pool[0, layer, 0]), ptr(pool[0, layer, 1]), strides, pages, indptr, lens, out, heads, group, dim, window, part, counters, grid)
                outs.append(out)
            torch.cuda.synchronize()
            err = relative_error(outs[0], ref) if ref.abs().sum() > 0 else outs[0].float().abs().max().item()
            n += 1
            row_err = (outs[0].float() - ref).norm(dim=(1, 2)) / ref.norm(dim=(1, 2)).clamp_min(1e-20)
            bad = not err < 6e-3 or not row_err[lens > 0].max().item() < 8e-3 if (lens > 0).any() else not err == 0
            if bad or not torch.equal(outs[0], outs[1]) or counters.abs().sum().item() != 0:
                print("WRONG", dim, group, heads, window, lens_l[:20], grid, "error", err, "equal", torch.equal(outs[0], outs[1]),
                      "rows", row_err.tolist()[:20])
                return False
            worst = max(worst, err)
    results.add(part="correctness", cases=n, worst=worst)
    print(f"correctness: {n} launches, worst relative error {worst:.2e}")
    return True


def layouts(best, shapes):
    heads, group, dim, layers, blocks = 8, 4, 128, 32, 40960
    per_layer = 2 * heads * PAGE * dim
    total = blocks * layers * per_layer
    pool = torch.empty(total, dtype=torch.bfloat16, device="cuda")
    for at in range(0, total, 1 << 30):
        pool[at:at + (1 << 30)].normal_()
    floats = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    ints = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(8 << 20, dtype=torch.uint8).pin_memory()
    part = torch.empty(1 << 24, device="cuda")

    def place(layout, layer):
        if layout == "block-major":
            k = layer * per_layer
            return ptr(pool, k), ptr(pool, k + per_layer // 2), (layers * per_layer, PAGE * dim, dim)
        k = layer * blocks * per_layer
        return ptr(pool, k), ptr(pool, k + per_layer // 2), (per_layer, PAGE * dim, dim)

    for batch, length in shapes:
        pages = length // PAGE
        table = torch.randperm(blocks)[:batch * pages].int().view(batch, pages).cuda()
        lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        q = torch.randn(batch, heads * group, dim, device="cuda").bfloat16()
        out = {n: torch.empty_like(q) for n in ("own", "peer")}
        counters = torch.zeros(batch * heads, dtype=torch.int32, device="cuda")
        indptr_host = torch.arange(0, (batch + 1) * pages, pages, dtype=torch.int32)
        indptr = indptr_host.cuda()
        last = torch.full((batch,), PAGE, dtype=torch.int32, device="cuda")
        check(peer.peer_plan(ptr(floats), ctypes.c_uint64(floats.numel()), ptr(ints), ptr(pinned), ctypes.c_uint64(ints.numel()),
                             ptr(indptr_host), i32(batch), i32(heads * group), stream()), "plan")
        torch.cuda.synchronize()
        graphs = {}
        for layout in ("block-major", "compact"):
            def run_peer():
                for l in range(layers):
                    k, v, st = place(layout, l)
                    check(peer.peer_run(ptr(q), k, v, i64(st[0]), i64(st[1]), i64(st[2]), ptr(indptr), ptr(table), ptr(last),
                                        ptr(out["peer"]), i32(batch), i32(heads * group), i32(heads), f32(1 / math.sqrt(dim)), stream()), "peer")
            graphs[("flashinfer", layout)] = capture(run_peer)
            for pdl in (0, 1):
                def run_own():
                    for l in range(layers):
                        k, v, st = place(layout, l)
                        own(q, k, v, st, table, indptr, lens, out["own"], heads, group, dim, 0, part, counters, 0, pdl)
                graphs[("own" + (" pdl" if pdl else ""), layout)] = capture(run_own)
        graphs[("flashinfer", "block-major")].replay()
        graphs[("own", "block-major")].replay()
        torch.cuda.synchronize()
        agree = relative_error(out["own"], out["peer"].float())
        bytes_ = batch * length * per_layer // PAGE * 2
        floor = bytes_ / best / 1e6
        timed = alternate(graphs, 11)
        print(f"{batch} x {length}: floor {floor:.2f} us a layer; own against peer {agree:.1e}")
        for (name, layout), (mid, lo, hi) in timed.items():
            us = mid / layers
            results.add(part="layout", batch=batch, length=length, kernel=name, layout=layout, us=us, low=lo / layers, high=hi / layers,
                        fraction_of_peak=floor / us, tb_s=bytes_ / us / 1e6, agree=agree)
        for name in dict.fromkeys(n for n, _ in timed):
            b = timed[(name, "block-major")][0] / layers
            line = f"  {name:20s} block-major {b:8.2f} us {100 * floor / b:5.1f} %"
            if (name, "compact") in timed:
                c = timed[(name, "compact")][0] / layers
                line += f"   compact {c:8.2f} us {100 * floor / c:5.1f} %   {100 * (b / c - 1):+.1f} %"
            print(line)


if not correctness():
    sys.exit(1)
if QUICK:
    sys.exit(0)
best = measure_peak()
torch.cuda.empty_cache()
layouts(best, ((32, 8192), (64, 4096), (128, 512), (64, 512), (1, 8192), (4, 8192), (1, 512), (8, 512)))
