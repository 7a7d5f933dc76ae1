#!/usr/bin/env python3
"""Checks libbaton_kernels.so on this machine's GPU against torch and numpy: check.py LIBRARY [--short] [part ...]

Needs torch and numpy. Prints a line for every group of cases and exits with 1 if a case failed. --short runs a few cases of
each group, without programmatic dependent launch, for compute-sanitizer.
"""

import itertools
import random
import sys
import time

import numpy as np
import torch

import fp8
import rules
from abi import *

NAN = float("nan")
lib = None
is_short = False


def few(cases, count):
    """Returns all cases, or some with --short."""
    cases = list(cases)
    return random.sample(cases, min(count, len(cases))) if is_short else cases


def near(got, want, tolerance, what):
    got, want = got.float(), want.float()
    if torch.isnan(got).any():
        raise AssertionError(f"{what}: NaN is left")
    if got.numel() == 0:
        return 0.0
    error = ((got - want).abs() / (1 + want.abs())).max().item()
    if not error <= tolerance:
        raise AssertionError(f"{what}: error {error:.2e} of {tolerance:.0e}")
    return error


def equal(got, want, what):
    if not torch.equal(got, want):
        where = (got != want).nonzero()[:3].tolist()
        raise AssertionError(f"{what}: differs at {where}: {got[tuple(where[0])]} for {want[tuple(where[0])]}")


def expect_error(code, text, call):
    try:
        call()
    except Error as error:
        assert error.code == code and text in str(error), f"{error} for {code}: {text}"
    else:
        raise AssertionError(f"no error, wanted {code}: {text}")


def rand(*shape, dtype=torch.float32, scale=1.0):
    return ((torch.rand(*shape, device="cuda") * 2 - 1) * scale).to(dtype)


def poisoned(rows, width, dtype):
    """Allocates one extra row, which detects writes beyond the end."""
    return torch.full((rows + 1, width), NAN, dtype=dtype, device="cuda")


def untouched_end(tensor, what):
    assert torch.isnan(tensor[-1].float()).all(), f"{what}: written beyond the end"


TYPES = [(torch.float32, 5e-6), (torch.bfloat16, 5e-3)]
SIZES = [(0, 64), (1, 8), (3, 576), (17, 1000), (5, 4096), (2, 8200), (3, 14336), (1, 32768), (600, 64)]


def check_rows():
    worst = 0
    for (dtype, tolerance), (rows, width) in few(itertools.product(TYPES, SIZES), 8):
        code, what = DTYPES[dtype], f"{dtype} {rows}x{width}"
        table, ids = rand(77, width, dtype=dtype), torch.randint(0, 77, (rows,), device="cuda", dtype=torch.int32)
        # The whole table, and the parts of three ranks.
        for first, end in ((0, 77), (0, 30), (30, 31), (31, 77)):
            out = poisoned(rows, width, torch.float32)
            lib.embed(code, table[first:end], first, end - first, 0.5, ids, out, rows, width)
            is_own = ((ids >= first) & (ids < end))[:, None]
            equal(out[:rows], table[ids.long()].float() * is_own * 0.5, f"embed {what} {first}..{end}")
            untouched_end(out, "embed")

        weight, residual, delta = rand(width), rand(rows, width, scale=3), rand(rows, width, dtype=dtype)
        norm = lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight
        out = poisoned(rows, width, dtype)
        lib.rms_norm(code, residual, weight, 1e-5, out, rows, width)
        worst = max(worst, near(out[:rows], norm(residual), tolerance, f"rms_norm {what}"))
        untouched_end(out, "rms_norm")

        x = poisoned(rows, width, dtype)
        x[:rows] = delta
        lib.rms_norm_in_place(code, x, weight, 1e-5, rows, width)
        near(x[:rows], norm(delta.float()), tolerance, f"rms_norm_in_place {what}")
        untouched_end(x, "rms_norm_in_place")

        summed, out = residual.clone(), poisoned(rows, width, dtype)
        lib.add_rms_norm(code, summed, delta, weight, 1e-5, out, rows, width)
        equal(summed, residual + delta.float(), f"residual {what}")
        near(out[:rows], norm(residual + delta.float()), tolerance, f"add_rms_norm {what}")
        if rows:
            chosen = torch.randint(0, rows, (rows + 2,), device="cuda", dtype=torch.int32)
            out = poisoned(rows + 2, width, dtype)
            lib.gather_rows(code, delta, chosen, out, rows + 2, width)
            equal(out[:-1], delta[chosen.long()], f"gather_rows {what}")
            untouched_end(out, "gather_rows")

        gate_up = rand(rows, 2 * width, dtype=dtype, scale=20)
        gate, up = gate_up.double().chunk(2, -1)
        gelu = torch.nn.functional.gelu(gate, approximate="tanh")
        for activation, wanted in enumerate([torch.nn.functional.silu(gate), gelu]):
            out = poisoned(rows, width, dtype)
            lib.activate(code, activation, gate_up, out, rows, width)
            near(out[:rows], wanted * up, 2 * tolerance, f"activation {activation} {what}")
            untouched_end(out, "activate")
    expect_error(1, "first is -1", lambda: lib.embed(0, rand(8), -1, 1, 1.0, rand(8), rand(8), 1, 8))
    expect_error(1, "activation is 2", lambda: lib.activate(0, 2, rand(16), rand(8), 1, 8))
    expect_error(1, "width is 12", lambda: lib.rms_norm(0, rand(8), rand(8), 1e-5, rand(8), 1, 12))
    expect_error(1, "dtype is 7", lambda: lib.rms_norm(7, rand(8), rand(8), 1e-5, rand(8), 1, 8))
    return f"worst {worst:.1e}"


def check_rope():
    cases = 0
    for (dtype, tolerance), dim, (heads, kv_heads) in few(itertools.product(
            TYPES, (8, 64, 80, 128, 256), ((1, 1), (9, 3), (32, 8), (14, 2))), 6):
        for rows, has_bias, has_norm, is_strided in ((1, 0, 0, 0), (600, 0, 0, 1), (513, 1, 1, 0), (33, 1, 0, 1), (17, 0, 1, 0), (5, 1, 1, 1)):
            layers, layer = 3, random.randrange(3)
            arena, kv = kv_arena(40, layers, kv_heads, dim, dtype)
            before = arena.clone()
            width = (heads + 2 * kv_heads) * dim
            qkv = rand(rows, width, dtype=dtype, scale=2)
            places = random.sample(range(40 * 16), rows)
            positions = [random.choice((0, 1, 31, 4095, 131_071)) for _ in range(rows)]
            bias = rand(width) if has_bias else None
            # A part of each head is rotated, and norms are over all heads, in some of the cases.
            rotary_dim = dim // 2 // 8 * 8 if rows in (513, 33) and dim >= 16 else dim
            all_heads = rows in (17, 600)
            norms = (None, None)
            if has_norm:
                norms = (rand(heads * dim), rand(kv_heads * dim)) if all_heads else (rand(dim), rand(dim))
            frequencies = torch.tensor([10000.0 ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)], device="cuda")
            stride = width if is_strided else heads * dim
            queries = torch.full((rows, stride), NAN, dtype=dtype, device="cuda")
            at, to = ints(positions), ints(places)
            pointer = lambda tensor: None if tensor is None else tensor.data_ptr()
            args = RopeArgs(qkv.data_ptr(), queries.data_ptr(), stride, pointer(bias), pointer(norms[0]),
                            pointer(norms[1]), frequencies.data_ptr(), at.data_ptr(), to.data_ptr(), 1e-6, heads,
                            layer, rows, rotary_dim, all_heads)
            lib.rope_store_kv(kv, args)
            x = qkv.double() + (bias.double() if has_bias else 0)
            x = x.view(rows, heads + 2 * kv_heads, dim)
            if has_norm:
                def normed(part, weight):
                    spans = (1, 2) if all_heads else -1
                    scaled = part * torch.rsqrt((part * part).mean(spans, keepdim=True) + 1e-6)
                    return scaled * weight.view(-1, dim)
                x = torch.cat((normed(x[:, :heads], norms[0]), normed(x[:, heads:heads + kv_heads], norms[1]),
                               x[:, heads + kv_heads:]), 1)
            angles = (at.float()[:, None] * frequencies[None]).double()[:, None]
            low, high = x[..., :rotary_dim // 2], x[..., rotary_dim // 2:rotary_dim]
            turned = torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin(),
                                x[..., rotary_dim:]), -1)
            what = f"rope {dtype} dim {dim} heads {heads}/{kv_heads} rows {rows}"
            near(queries[:, :heads * dim], turned[:, :heads].reshape(rows, -1), 2 * tolerance, what)
            if is_strided:
                assert torch.isnan(queries[:, heads * dim:].float()).all(), f"{what}: written between queries"
            block, token = to.long() // 16, to.long() % 16
            near(arena[block, layer, 0, :, token], turned[:, heads:heads + kv_heads], 2 * tolerance, what + " keys")
            near(arena[block, layer, 1, :, token], x[:, heads + kv_heads:], 2 * tolerance, what + " values")
            arena[block, layer, :, :, token] = before[block, layer, :, :, token]
            assert torch.isnan(arena.float()).all(), f"{what}: written elsewhere"
            cases += 1
    arena, kv = kv_arena(2, 1, 1, 8, torch.float32)
    kv.block_elements += 8
    expect_error(1, "block_elements", lambda: lib.rope_store_kv(kv, args))
    return f"{cases} cases"


def check_fp8_kv():
    """Checks that stored FP8 KV is bit-equal to the rule applied to stored bf16 KV, and that it dequantizes exactly."""
    cases = 0
    for dim, (heads, kv_heads), rows in few(itertools.product((8, 64, 80, 128, 256), ((1, 1), (9, 3), (32, 8)), (1, 33, 600)), 6):
        blocks, layers, layer = 40, 3, random.randrange(3)
        width = (heads + 2 * kv_heads) * dim
        qkv = (torch.randn(rows, width, device="cuda") * torch.exp2(torch.randint(-12, 12, (rows, 1), device="cuda").float())).bfloat16()
        # Bits of any value in some rows, subnormal ones, zeros, and single infinities and NaN.
        bits = qkv.view(torch.int16)
        bits[::7] = torch.randint(-2**15, 2**15, bits[::7].shape, dtype=torch.int16, device="cuda")
        bits[1::7] = torch.randint(0, 1200, bits[1::7].shape, dtype=torch.int16, device="cuda")
        qkv[2::7] = 0
        qkv[3::7, ::37] = torch.inf
        qkv[4::7, ::41] = -torch.inf
        qkv[5::7, ::43] = NAN
        at, to = ints([random.randrange(4096) for _ in range(rows)]), ints(random.sample(range(blocks * 16), rows))
        frequencies = rand(dim // 2).abs()
        arenas = kv_arena(blocks, layers, kv_heads, dim, torch.bfloat16), fp8_arena(blocks, layers, kv_heads, dim)
        before, queries = arenas[1][0].clone(), []
        for _, kv in arenas:
            queries.append(torch.empty(rows, heads * dim, dtype=torch.bfloat16, device="cuda"))
            lib.rope_store_kv(kv, RopeArgs(qkv.data_ptr(), queries[-1].data_ptr(), heads * dim, None, None, None,
                                           frequencies.data_ptr(), at.data_ptr(), to.data_ptr(), 1e-6, heads, layer, rows, dim, 0))
        what = f"dim {dim} heads {heads}/{kv_heads} rows {rows}"
        equal(queries[0].view(torch.int16), queries[1].view(torch.int16), what + " queries")
        (plain, _), (stored, kv) = arenas
        block, token = to.long() // 16, to.long() % 16
        codes, exponents = fp8.quantize(plain[block, layer, :, :, token].view(torch.int16).cpu().numpy().view(np.uint16))
        want = before.clone()
        want[..., : 16 * dim].unflatten(-1, (16, dim))[block, layer, :, :, token] = torch.from_numpy(codes).cuda()
        want[..., 16 * dim :][block, layer, :, :, token] = torch.from_numpy(exponents).cuda()
        equal(stored, want, what)
        pages = ints(random.choices(range(blocks), k=rows))
        out = poisoned(rows, 2 * kv_heads * 16 * dim, torch.bfloat16)
        lib.dequantize_kv(kv, layer, pages, rows, out)
        untouched_end(out, "dequantize_kv")
        got = out[:rows].view(rows, 2, kv_heads, 16, dim).float()
        wanted = fp8.dequantize(stored[pages.long(), layer], dim)
        is_stored = torch.zeros(blocks, 16, dtype=torch.bool, device="cuda")
        is_stored[block, token] = True
        mask = is_stored[pages.long()][:, None, None, :, None]
        equal(torch.where(mask, got, 0), torch.where(mask, wanted, 0), what + " dequantized")
        cases += 1
    expect_error(1, "kv.dtype is 1; expected 2", lambda: lib.dequantize_kv(arenas[0][1], 0, pages, 1, out))
    kv.block_elements -= 16
    expect_error(1, "block_elements", lambda: lib.dequantize_kv(kv, 0, pages, 1, out))
    return f"{cases} cases"


RULE_WIDTH = 8


class Host:
    """Host state for encoding plans, and the expected device state."""

    def __init__(self, slots, token_width, blocks, stop_width=8, windows=(0,)):
        self.slots, self.token_width, self.windows = slots, token_width, windows
        self.table_width = (token_width + 15) // 16 * len(windows)
        self.memory = dict(
            slots=torch.zeros(slots * 4, dtype=torch.int32, device="cuda"),
            sampling=torch.zeros(slots * 16, dtype=torch.int32, device="cuda"),
            tokens=torch.zeros(slots, token_width, dtype=torch.int32, device="cuda"),
            block_tables=torch.zeros(slots, self.table_width, dtype=torch.int32, device="cuda"),
            stop_tokens=torch.zeros(slots, stop_width, dtype=torch.int32, device="cuda"),
            rules=torch.zeros(slots, RULE_WIDTH, dtype=torch.int32, device="cuda"))
        self.adapters = torch.zeros(slots, dtype=torch.int32, device="cuda")
        self.pool = Pool(*[tensor.data_ptr() for tensor in self.memory.values()], slots, token_width,
                         self.table_width, stop_width, blocks - 2, RULE_WIDTH, blocks - 1, len(windows),
                         (I32 * 16)(*windows), self.adapters.data_ptr())
        self.free = list(range(blocks - 2))
        random.shuffle(self.free)
        self.live = {}  # slot: dict(tokens, position, table)

    def admission(self, slot, tokens, computed=0, **how):
        settings = dict(seed=0, temperature=0.0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0,
                        frequency_penalty=0.0, top_k=0, min_tokens=0, stop_count=0, logprobs=-1,
                        prompt_len=len(tokens)) | how
        table = [self.free.pop() for _ in range((len(tokens) + 40) // 16 * len(self.windows))]
        self.live[slot] = dict(tokens=list(tokens), position=computed, table=table)
        runs = [(0, slot, 0, list(tokens)), (1, slot, 0, table)]
        return (PlanAdmission(slot, slot % 3 - 1, (I32 * 2)(), Slot(computed, len(tokens), 0, 0), Sampling(**settings)), runs)

    def write(self, step_id, admissions, sequences, runs=()):
        """Returns the plan as a tensor of words. Sequences are (slot, rows, samples)."""
        runs = [run for _, own in admissions for run in own] + list(runs)
        words = [0] * 16
        place = lambda: words.extend([0] * (-len(words) % 4)) or len(words)
        as_words = lambda item: list((U32 * (ctypes_size(item) // 4)).from_buffer_copy(item))
        sequences_at = place()
        for sequence in sequences:
            words += as_words(PlanSequence(*sequence))
        admissions_at = place()
        for admission, _ in admissions:
            words += as_words(admission)
        runs_at = place()
        at = runs_at + 5 * len(runs)
        for target, slot, first, values in runs:
            words += as_words(PlanRun(target, slot, first, len(values), at))
            at += len(values)
        for *_, values in runs:
            words += [value & 0xFFFFFFFF for value in values]
        words[:16] = as_words(PlanHeader(len(words), len(sequences), sum(s[1] for s in sequences),
                                         sum(s[2] for s in sequences), len(admissions), len(runs), sequences_at,
                                         admissions_at, runs_at, step_id))
        return torch.tensor(words, dtype=torch.int64).to(torch.int32)

    def expected(self, sequences, rows, padded, samples):
        out = {name: [] for name in (*STEP_ARRAYS, *ADAPTER_ARRAYS)}
        out["row_indptr"], out["page_indptr"] = [0], [0]
        groups = len(self.windows)
        destinations, page_indices = [[] for _ in self.windows], [[] for _ in self.windows]
        trash = self.pool.trash_block
        for index in range(padded):
            slot, count, sampled = sequences[index] if index < len(sequences) else (-1, 1, 0)
            state = self.live[slot] if slot >= 0 else dict(tokens=[0], position=0, table=[trash] * groups)
            first = state["position"]
            state["position"] = length = first + count
            base = len(out["row_tokens"])
            for position in range(first, length):
                out["row_tokens"].append(state["tokens"][position])
                out["row_positions"].append(position)
                for group in range(groups):
                    block = state["table"][position // 16 * groups + group]
                    destinations[group].append(block * 16 + position % 16)
                out["row_sequences"].append(index)
                out["row_adapters"].append(slot % 3 - 1 if slot >= 0 else -1)
            for group, window in enumerate(self.windows):
                unseen = max(first + 1 - window, 0) // 16 if window else 0
                pages = state["table"][group::groups][unseen : (length + 15) // 16]
                page_indices[group] += [self.pool.zero_block] * unseen + pages
            out["page_indptr"].append(len(page_indices[0]))
            out["row_indptr"].append(len(out["row_tokens"]))
            out["last_page_tokens"].append((length - 1) % 16 + 1)
            out["kv_lengths"].append(length if slot >= 0 else 0)
            out["sequence_slots"].append(slot)
            for sample in range(sampled):
                out["sampled_rows"].append(base + count - sampled + sample)
                out["sample_slots"].append(slot)
                out["sample_masks"].append(-1)
                out["sample_adapters"].append(slot % 3 - 1)
        padding = padded - len(sequences)
        out["counts"] = [len(sequences), len(out["row_tokens"]) - padding, len(out["sampled_rows"]),
                         len(page_indices[0]) - padding]
        while len(out["row_tokens"]) < rows:
            for group in destinations:
                group.append(trash * 16 + len(out["row_tokens"]) % 16)
            out["row_tokens"].append(0)
            out["row_positions"].append(0)
            out["row_sequences"].append(-1)
            out["row_adapters"].append(-1)
        while len(out["sampled_rows"]) < samples:
            out["sampled_rows"].append(0)
            out["sample_slots"].append(-1)
            out["sample_masks"].append(-1)
            out["sample_adapters"].append(-1)
        return out | dict(row_destinations=destinations, page_indices=page_indices)


def ctypes_size(item):
    import ctypes
    return ctypes.sizeof(item)


def check_step():
    steps = 0
    for slots, most, longest in ((1, 1, 5), (7, 4, 40), (300, 260, 100), (4, 2, 6000), (1100, 1100, 20)):
        windows = random.choice(((0,), (random.randint(2, longest + 2),), (0, random.randint(2, 40), 128)))
        host = Host(slots, longest + 64, (slots * ((longest + 64) // 16 + 2) + 8) * len(windows), windows=windows)
        buffer = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
        for step in range(6):
            admissions, sequences, used = [], [], random.sample(range(slots), random.randint(0, min(most, slots)))
            for slot in used:
                state = host.live.get(slot)
                if state is None or len(state["tokens"]) + 8 > longest or random.random() < 0.1:
                    if state:
                        host.free += state["table"]
                    tokens = [random.randrange(50_000) for _ in range(random.randint(1, longest))]
                    admissions.append(host.admission(slot, tokens, random.randrange(len(tokens))))
                    state = host.live[slot]
                left = len(state["tokens"]) - state["position"]
                if left == 0:
                    continue
                count = random.choice((1, left, random.randint(1, left)))
                sequences.append((slot, count, random.randint(0, min(3, count))))
            rows, samples = sum(s[1] for s in sequences), sum(s[2] for s in sequences)
            padding = random.choice((0, 0, 1, 9))
            extra = padding + random.choice((0, 3))
            plan = host.write(100 + step, admissions, sequences)
            buffer[: len(plan)] = plan.cuda()
            want = host.expected(sequences, rows + extra, len(sequences) + padding, samples + padding)
            arrays = StepArrays(rows + extra + 2, len(sequences) + padding, len(want["page_indices"][0]) + 2,
                                samples + padding + 2, len(windows))
            lib.step_prepare(host.pool, buffer, arrays.struct, rows + extra, len(sequences) + padding,
                             samples + padding, 0)
            want["counts"] += [100 + step, 0, 0, 0]
            for name, values in want.items():
                found = arrays.tensors[name]
                if name in ("row_destinations", "page_indices"):
                    parts = list(zip(found.chunk(len(windows)), values))
                else:
                    parts = [(found, values)]
                for found, values in parts:
                    equal(found[: len(values)], ints(values), f"step {name}, {slots} slots, windows {windows}")
                    assert name == "counts" or (found[len(values):] == -77).all(), f"step {name}: written beyond the end"
            supplied = [(sample, random.choice((-1, 3))) for sample in range(samples) if random.random() < 0.5]
            buffer[: 2 * len(supplied)] = ints([word for pair in supplied for word in pair])
            lib.step_supply(host.pool, buffer, arrays.struct, len(supplied))
            for sample, mask in supplied:
                if mask < 0:
                    host.live[want["sample_slots"][sample]]["position"] -= 1
                    want["sample_slots"][sample] = -1
                else:
                    want["sample_masks"][sample] = mask
            for name in ("sample_slots", "sample_masks"):
                equal(arrays.tensors[name][: samples], ints(want[name][:samples]), f"supplied {name}")
            steps += 1
    return f"{steps} steps"


def attention_reference(queries, arena, layer, sequences, window, sinks=None):
    """Returns attention in float64, [rows][heads][dim]."""
    out = torch.zeros_like(queries, dtype=torch.float64)
    heads, dim = queries.shape[1:]
    for index, ((rows, length), table) in enumerate(zip(sequences.shapes, sequences.tables)):
        kv = arena[table, layer].transpose(0, 1).transpose(1, 2)  # [half][head][page][token][dim], then joined
        kv = kv.reshape(2, arena.shape[3], -1, dim)[:, :, :length].double()
        keys, values = (kv[half].repeat_interleave(heads // arena.shape[3], 0) for half in (0, 1))
        first = sequences.row_indptr[index]
        q = queries[first : first + rows].double().transpose(0, 1)
        scores = q @ keys.transpose(1, 2) * dim**-0.5
        row = torch.arange(length - rows, length, device="cuda")[:, None]
        column = torch.arange(length, device="cuda")[None]
        hidden = column > row
        if window:
            hidden |= column <= row - window
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, rows, 1)], -1)
        out[first : first + rows] = (scores.softmax(-1)[..., :length] @ values).transpose(0, 1)
    return out


ATTENTION_NAMES = {PLAIN: "plain", FA2: "FA2", FA3: "FA3", AUTO: "auto"}
memory = None


def run_attention(kind, shape, kv, layer, queries, sequences, arrays, sinks=None):
    out = torch.full_like(queries, NAN)
    plan = AttentionPlan()
    torch.cuda.current_stream().synchronize()  # the staging buffer is free
    lib.attention_prepare(kind, shape, sequences.batch(), memory.struct, plan)
    heads, dim = queries.shape[1:]
    lib.attention_run(plan, shape, memory.struct, kv, layer, queries, heads * dim, arrays.struct, sinks, out,
                      sequences.count, sequences.rows)
    return out, plan


def attention_cases():
    """Yields (kind, dtype, dim, KV heads, group, window, shapes)."""
    decode = [[(1, 1)], [(1, 16), (1, 17), (1, 300)], [(1, random.randint(1, 700)) for _ in range(33)], [(1, 5000)]]
    prefill = [[(1, 1)], [(5, 5), (17, 33), (1, 100), (130, 300)], [(700, 1500), (64, 64)], [(2, 18), (257, 257)]]
    for group, dim in itertools.product(range(1, 9), (64, 128, 256)):
        heads = random.choice((1, 2, 3))
        for window in (0, 100):
            for shapes in decode:
                yield FA2, torch.bfloat16, dim, heads, group, window, shapes
                yield PLAIN, torch.bfloat16, dim, heads, group, window, shapes
            for shapes in prefill:
                yield FA2, torch.bfloat16, dim, heads, group, window, shapes
                yield PLAIN, torch.float32, dim, heads, group, window, shapes
                yield AUTO, torch.bfloat16, dim, heads, group, window, shapes
                if not window and torch.cuda.get_device_capability() == (9, 0):
                    yield FA3, torch.bfloat16, dim, heads, group, window, shapes
    for dim in (8, 80, 96):
        yield PLAIN, torch.float32, dim, 2, 3, 0, prefill[1]
        yield AUTO, torch.bfloat16, dim, 2, 3, 20, prefill[1]


def check_attention():
    worst = {}
    for kind, dtype, dim, kv_heads, group, window, shapes in few(attention_cases(), 60):
        blocks, layers, layer = 1000, 2, random.randrange(2)
        arena, kv = kv_arena(blocks, layers, kv_heads, dim, dtype)
        sequences = Sequences(shapes, range(blocks - 1), padding=random.choice((0, 3)), trash=blocks - 1)
        # KV outside the rows' context stays NaN: other blocks and the other layer. Unused tokens of last blocks are zeros,
        # because a kernel may read them with weight 0.
        used = [block for table in sequences.tables for block in table]
        arena[used, layer] = 0
        for (_, length), table in zip(sequences.shapes, sequences.tables):
            values = rand(2, kv_heads, len(table) * 16, dim, dtype=dtype)
            values[:, :, length:] = 0
            arena[table, layer] = values.view(2, kv_heads, len(table), 16, dim).permute(2, 0, 1, 3, 4)
        queries = rand(sequences.rows, kv_heads * group, dim, dtype=dtype, scale=3)
        shape = Shape(kv_heads * group, kv_heads, dim, DTYPES[dtype], window, dim**-0.5)
        arrays = sequences.step()
        sinks = random.choice((None, 4 * rand(kv_heads * group)))
        out, plan = run_attention(kind, shape, kv, layer, queries, sequences, arrays, sinks)
        want = attention_reference(queries, arena, layer, sequences, window, sinks)
        what = (f"{ATTENTION_NAMES[kind]} (as {ATTENTION_NAMES[plan.kind]}) {dtype} dim {dim} group {group} window "
                f"{window} {'sinks ' if sinks is not None else ''}{shapes[:4]}")
        error = near(out, want, 1e-5 if dtype == torch.float32 else 1.2e-2, what)
        key = f"{ATTENTION_NAMES[kind]}"
        worst[key] = max(worst.get(key, (0, 0))[0], error), worst.get(key, (0, 0))[1] + 1
    return ", ".join(f"{name} {count} worst {error:.0e}" for name, (error, count) in worst.items())


def decode_cases():
    """Yields (KV type, dim, KV heads, group, window, query tokens, lengths)."""
    odd = [1, 15, 16, 17, 33, 255, 256, 257, 1000, 4097, 2, 31, 700]
    for kv_dtype, dim in itertools.product((BF16, FP8), (64, 128, 256)):
        for group in (1, 3, 4, 5, 8, 9, 12, 16):
            for window in (0, 100):
                yield kv_dtype, dim, random.choice((1, 2, 8)), group, window, 1, odd + [0]
                tokens = random.randint(2, 8)
                yield kv_dtype, dim, random.choice((1, 2, 8)), group, window, tokens, [max(n, tokens) for n in odd]
        yield kv_dtype, dim, 8, 4, 0, 1, [617] * 128  # four heads per CTA
        yield kv_dtype, dim, 8, random.randint(1, 16), 333, 1, [random.randint(0, 700) for _ in range(300)]
        yield kv_dtype, dim, 1, 2, 0, 1, [131_072, 5]


def check_decode():
    """Checks decode attention against float64. Nothing outside the rows' tokens may matter."""
    worst = {BF16: 0.0, FP8: 0.0}
    cases = few(decode_cases(), 12)
    for kv_dtype, dim, heads, group, window, tokens, lengths in cases:
        rows, layers, layer = len(lengths), 2, 1
        need = [(length + 15) // 16 for length in lengths]
        order = random.sample(range(sum(need) + 3), sum(need))
        sizes = sum(need) + 3, layers, heads, dim
        arena, _ = fp8_arena(*sizes) if kv_dtype == FP8 else kv_arena(*sizes, torch.bfloat16)
        q = rand(rows * tokens, heads * group, dim, dtype=torch.bfloat16, scale=3)
        want = torch.zeros(rows * tokens, heads, group, dim, dtype=torch.float64, device="cuda")
        sinks = random.choice((None, 4 * rand(heads * group)))
        positions, at = [], 0
        for row, length in enumerate(lengths):
            # Draft tokens may reach beyond the length.
            first = max(length - tokens + random.choice((0, 0, 1)), 0) if tokens > 1 else length - 1
            positions += range(first, first + tokens)
            pages = order[at : at + need[row]]
            at += need[row]
            if not length:
                continue
            shape = (need[row], 2, heads, 16, dim)
            values = torch.randn(shape, device="cuda") * torch.exp2(torch.randint(-3, 3, (*shape[:-1], 1), device="cuda").float())
            if length > 100_000:  # one key that the first query finds
                values[70_000 // 16, 0, 0, 70_000 % 16] = 2 * q[row * tokens, 0].float()
            seen = torch.arange(16 * need[row], device="cuda").view(-1, 16) < length
            if kv_dtype == FP8:
                blocks, unseen = fp8.blocks_of(values), ~seen[:, None, None, :].expand(shape[:-1])
                blocks[..., : 16 * dim].unflatten(-1, (16, dim))[unseen] = 0x7F
                blocks[..., 16 * dim :][unseen] = 255
                arena[pages, layer] = blocks
                known = fp8.dequantize(blocks, dim)
            else:
                known = torch.where(seen[:, None, None, :, None], values, NAN).bfloat16()
                arena[pages, layer] = known
            keys, values = known.permute(1, 2, 0, 3, 4).reshape(2, heads, -1, dim)[:, :, :length].double()
            queries = q[row * tokens : (row + 1) * tokens].double().unflatten(1, (heads, group))
            scores = torch.einsum("thgd,hnd->thgn", queries, keys) * dim**-0.5
            ends = torch.tensor([min(first + 1 + t, length) for t in range(tokens)], device="cuda")[:, None, None, None]
            index = torch.arange(length, device="cuda")
            scores = scores.masked_fill((index >= ends) | ((index < ends - window) if window else False), -torch.inf)
            if sinks is not None:
                scores = torch.cat((scores, sinks.double().view(heads, group, 1).expand(tokens, -1, -1, 1)), -1)
            weights = scores.softmax(-1)[..., :length]
            if length > 100_000:
                assert sinks is not None or weights[0, 0, 0, 70_000] > 0.9
            want[row * tokens : (row + 1) * tokens] = torch.einsum("thgn,hnd->thgd", weights, values)
        indptr = ints([0, *itertools.accumulate(need)])
        lens, table, places = ints(lengths), ints(order + [0]), ints(positions)
        counters = torch.zeros(rows * tokens * heads, dtype=torch.int32, device="cuda")
        for sms in (0, 7):
            partial = torch.full((lib.raw.baton_decode_attention_workspace(sms, heads, group, dim) // 4,), NAN, device="cuda")
            outs = []
            for _ in range(2):
                outs.append(torch.full_like(q, NAN))
                keys, values = arena[0, layer, 0], arena[0, layer, 1]
                lib.decode_attention(DecodeArgs(
                    q.data_ptr(), q.stride(0), keys.data_ptr(), values.data_ptr(), arena.stride(0), arena.stride(3), dim,
                    table.data_ptr(), indptr.data_ptr(), lens.data_ptr(), outs[-1].data_ptr(), q.stride(0), partial.data_ptr(),
                    counters.data_ptr(), rows, heads, group, dim, window, dim**-0.5, sms, 0, tokens, kv_dtype,
                    places.data_ptr() if tokens > 1 else None, None if sinks is None else sinks.data_ptr()))
            what = f"{'FP8' if kv_dtype == FP8 else 'bf16'} dim {dim} heads {heads}x{group} window {window} tokens {tokens} sms {sms} {lengths[:6]}"
            equal(*outs, what + ", second run")
            assert not counters.any(), what + ": counters"
            got = outs[0].view(want.shape).double()
            assert not got[want.abs().sum((1, 2, 3)) == 0].any(), what + ": empty rows"
            errors = (got - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-20)
            error = errors.max().item()
            assert error < 8e-3, f"{what}: error {error:.1e} at {(errors > 8e-3).nonzero()[:4].tolist()}"
            worst[kv_dtype] = max(worst[kv_dtype], error)
    return f"{2 * len(cases)} cases, worst bf16 {worst[BF16]:.1e}, FP8 {worst[FP8]:.1e}"


def check_attention_invariance():
    """Checks that a row's bits in the plain kernel depend only on its sequence, not on prefill chunks."""
    for dtype in DTYPES:
        arena, kv = kv_arena(200, 1, 2, 64, dtype, 0)
        arena.copy_(rand(*arena.shape, dtype=dtype))
        shape = Shape(6, 2, 64, DTYPES[dtype], 0, 0.125)
        whole = Sequences([(150, 150)], range(100))
        queries = rand(150, 6, 64, dtype=dtype)
        want, _ = run_attention(PLAIN, shape, kv, 0, queries, whole, whole.step())
        for begin, end in ((0, 1), (0, 47), (47, 150), (149, 150), (100, 101)):
            part = Sequences([(end - begin, end), (9, 300), (1, 1)], range(100, 200), padding=2, trash=199)
            part.tables[0] = whole.tables[0][: len(part.tables[0])]
            values = dict(part.step_values)
            pages = [block for table in part.tables for block in table]
            values["page_indices"] = pages
            arrays = part.step()
            arrays.fill(page_indices=pages)
            mixed = rand(part.rows, 6, 64, dtype=dtype)
            mixed[: end - begin] = queries[begin:end]
            got, _ = run_attention(PLAIN, shape, kv, 0, mixed, part, arrays)
            equal(got[: end - begin], want[begin:end], f"plain attention, rows {begin}..{end}")
    return ""


GREEDY = dict(seed=0, temperature=0.0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0,
              frequency_penalty=0.0, top_k=0, min_tokens=0, logprobs=-1)


def random_how():
    how = dict(GREEDY, seed=random.getrandbits(64), logprobs=random.choice((-1, -1, 0, 1, 5, 20)))
    if random.random() < 0.85:
        how["temperature"] = random.choice((0.2, 0.7, 1.0, 1.0, 2.5))
        how["top_k"] = random.choice((0, 0, 1, 5, 40, 1000, 6000))
        how["top_p"] = random.choice((1.0, 1.0, 0.95, 0.5, 0.999, 1e-6))
        how["min_p"] = random.choice((0.0, 0.0, 0.02, 1e-5, 1.0))
    if random.random() < 0.3:
        how["repetition_penalty"] = random.choice((1.0, 1.3, 0.8))
        how["presence_penalty"] = random.choice((0.0, 0.6))
        how["frequency_penalty"] = random.choice((0.0, 0.4, -0.3))
    if random.random() < 0.3:
        how["min_tokens"] = random.choice((1, 8, 100))
    return how


def without(how, needs):
    """Returns the settings without those whose bit is missing in `needs`."""
    left = dict(how)
    if not needs & NEEDS_DRAW:
        left["temperature"] = 0.0
    if not needs & NEEDS_CUT:
        left["top_k"], left["top_p"] = 0, 1.0
    if not needs & NEEDS_LOGPROBS:
        left["logprobs"] = -1
    if not needs & NEEDS_PENALTIES:
        left["repetition_penalty"], left["presence_penalty"], left["frequency_penalty"] = 1.0, 0.0, 0.0
    return left


def random_logits(vocabulary):
    shape = random.choice(("normal", "sharp", "flat", "ties", "few", "very sharp"))
    x = np.random.standard_normal(vocabulary).astype(np.float32)
    if shape == "sharp":
        x *= np.float32(6)
    elif shape == "very sharp":
        x *= np.float32(2)
        x[random.randrange(vocabulary)] += np.float32(25)
    elif shape == "flat":
        x *= np.float32(random.choice((0.01, 0.3, 1.3)))
    elif shape == "ties":
        x = np.round(x * np.float32(2)).astype(np.float32)
    elif shape == "few":
        x[np.random.rand(vocabulary) < 0.9] = -np.inf
        x[random.randrange(vocabulary)] = 1
    return x


def check_sample():
    total, unlike, by_rounding = 0, [], 0
    for vocabulary in few((1, 5, 1000, 1024, 1025, 32_003, 49_152, 128_256), 3):
        stride = (vocabulary + 7) // 4 * 4
        for count in (1, 3, 40):
            cases = 2 if vocabulary > 100_000 else 6
            width = 96
            host = Host(64, width, 8, stop_width=6)
            arrays = StepArrays(64, 64, 1, 64)
            scratch = torch.zeros(lib.raw.baton_group_sample_scratch_bytes(1, 64, vocabulary) // 4, dtype=torch.int32,
                                  device="cuda")
            results = torch.full((64, 8), -99, dtype=torch.int32, device="cuda")
            top = torch.full((64, TOP_MAX, 2), -99, dtype=torch.int32, device="cuda")
            for _ in range(cases):
                rows, wanted = [], []
                masks = np.random.rand(count, (vocabulary + 31) // 32 * 32) < random.choice((0.02, 0.5, 1.0))
                if random.random() < 0.1:
                    masks[:] = False
                logits = torch.full((count, stride), NAN)
                settings, tokens = [], torch.zeros(64, width, dtype=torch.int32)
                # Kernels to launch. In half of the calls rows need further kernels; those needs are ignored.
                needs, promised = random.choice((0, 0, 1, 3, 4, 5, 8, 9, 15, 15)), random.random() < 0.5
                stops = torch.zeros(64, 6, dtype=torch.int32)
                states, order = torch.zeros(64, 4, dtype=torch.int32), random.sample(range(64), count)
                for index, slot in enumerate(order):
                    x = random_logits(vocabulary)
                    if random.random() < 0.05:
                        x[random.randrange(vocabulary)] = random.choice((np.nan, np.inf))
                    asked = random_how()
                    how = without(asked, needs)
                    length = random.randint(1, width - 1)
                    prompt = random.randint(0, length)
                    own = [random.randrange(vocabulary + 2) for _ in range(length)]
                    if vocabulary > 5:
                        own = [random.choice((token, 3, 4)) for token in own]
                    stop = [random.choice((int(np.argmax(np.nan_to_num(x, nan=-1e30, posinf=1e30))), vocabulary + 5, 0)) for _ in range(random.choice((0, 2, 6)))]
                    mask = masks[index][:vocabulary] if random.random() < 0.3 else None
                    logits[index, :vocabulary] = torch.from_numpy(x)
                    tokens[slot, :length] = torch.tensor(own)
                    stops[slot, : len(stop)] = torch.tensor(stop, dtype=torch.int32)
                    states[slot, 0], states[slot, 1] = length, length
                    settings.append((slot, Sampling(**(how if promised else asked), stop_count=len(stop), prompt_len=prompt)))
                    rows.append((slot, length - 1, -1 if mask is None else index, length, how, x))
                    wanted.append(rules.sample(x, how, own[:prompt], own[prompt:], mask, stop))
                device_logits = logits.cuda()
                for slot, how in settings:
                    words = torch.tensor(list((I32 * 16).from_buffer_copy(how)), dtype=torch.int32)
                    host.memory["sampling"][slot * 16 : slot * 16 + 16] = words.cuda()
                host.memory["tokens"].copy_(tokens)
                host.memory["stop_tokens"].copy_(stops)
                host.memory["slots"].copy_(states.view(-1))
                # Samples are rows of the step in another order; two more are padding.
                shuffled = random.sample(range(count), count)
                positions = [0] * count
                for index, place in enumerate(shuffled):
                    positions[place] = rows[index][1]
                arrays.fill(row_positions=positions, sampled_rows=shuffled + [0, 0],
                            sample_slots=[row[0] for row in rows] + [-1, -1],
                            sample_masks=[row[2] for row in rows] + [-1, -1], counts=[count, count, count, 0, 77, 0, 0, 0])
                bits = torch.from_numpy(np.packbits(masks, axis=1, bitorder="little").view(np.int32).copy()).cuda()
                samples = min(count + 2, 64)
                padded = torch.cat((device_logits, torch.full((2, stride), NAN, device="cuda")))
                args = SampleArgs(padded.data_ptr(), stride, bits.data_ptr(), results.data_ptr(), top.data_ptr(),
                                  scratch.data_ptr(), scratch.numel() * 4, vocabulary, samples, needs, 0)
                lib.sample(host.pool, arrays.struct, args)
                got = [SampleResult.from_buffer_copy(row.numpy().tobytes()) for row in results.cpu()]
                tops, pool_tokens, pool_slots = top.cpu(), host.memory["tokens"].cpu(), host.memory["slots"].cpu().view(64, 4)
                for index, (row, want) in enumerate(zip(rows, wanted)):
                    slot, position, _, length, how, x = row
                    result = got[index]
                    what = f"vocabulary {vocabulary}, {how}, length {length}"
                    total += 1
                    assert (result.slot, result.position, result.step_id) == (slot, position, 77), what
                    assert result.status == want["status"], f"status {result.status} for {want}: {what}"
                    assert pool_slots[slot].tolist() == [length, length + 1, want["status"], 0], what
                    if want["status"]:
                        assert result.token == want["token"], f"{result.token} for {want}: {what}"
                        assert pool_tokens[slot, length] == 0
                        continue
                    assert pool_tokens[slot, length] == result.token, "not appended"
                    if result.token != want["token"]:
                        unlike.append(f"{result.token} for {want['token']}: {what}")
                        continue
                    if how["logprobs"] >= 0:
                        assert abs(result.logprob - want["chosen"]) <= 1e-5 * max(1, abs(want["chosen"])), what
                        assert result.top_count == len(want["top"]), what
                        for place, (token, logprob) in enumerate(want["top"]):
                            got_token = int(tops[index, place, 0])
                            got_logprob = float(tops[index, place, 1:].view(torch.float32))
                            assert got_token == token, f"top {place}: {got_token} for {token}: {what}"
                            assert got_logprob == logprob or abs(got_logprob - logprob) < 1e-5 * max(1, abs(logprob)), what
                assert all(got[i].slot == -1 for i in range(count, samples)), "padding"
    # Rounding may move the top-p cut by one token; nothing else may differ.
    assert len(unlike) <= total // 500, f"{len(unlike)} of {total} draws differ: {unlike[:3]}"
    return f"{total} draws, {len(unlike)} unlike" + (f" ({unlike[0]})" if unlike else "")


def check_step_graph():
    """Checks steps and sampling in one graph: each step reads the tokens that the previous step sampled."""
    vocabulary, bucket = 5000, 8
    host = Host(10, 64, 100)
    arrays = StepArrays(bucket, bucket, 64, bucket)
    buffer = torch.zeros(4096, dtype=torch.int32, device="cuda")
    table = torch.randn(vocabulary, vocabulary, device="cuda")  # logits of the next token, by token
    scratch = torch.zeros(lib.raw.baton_group_sample_scratch_bytes(1, bucket, vocabulary) // 4, dtype=torch.int32, device="cuda")
    results = torch.zeros(bucket, 8, dtype=torch.int32, device="cuda")
    logits = torch.zeros(bucket, vocabulary, device="cuda")
    args = SampleArgs(logits.data_ptr(), vocabulary, None, results.data_ptr(), None, scratch.data_ptr(),
                      scratch.numel() * 4, vocabulary, bucket, NEEDS_DRAW | NEEDS_CUT, 0)

    def step():
        lib.step_prepare(host.pool, buffer, arrays.struct, bucket, bucket, bucket, 0)
        torch.index_select(table, 0, arrays.row_tokens[:bucket], out=logits)
        lib.sample(host.pool, arrays.struct, args)

    step()  # an empty plan
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        step()
    slots = random.sample(range(10), 5)
    how = {slot: dict(GREEDY, seed=slot, temperature=1.0, top_k=random.choice((0, 50))) for slot in slots}
    admissions = [host.admission(slot, [slot + 7], **how[slot]) for slot in slots]
    truth, tables = {slot: [slot + 7] for slot in slots}, table.cpu().numpy()
    for number in range(20):
        plan = host.write(number, admissions if number == 0 else [], [(slot, 1, 1, -1) for slot in slots])
        buffer[: len(plan)] = plan.cuda()
        graph.replay()
        for slot in slots:
            truth[slot].append(rules.sample(tables[truth[slot][-1]], how[slot], (), truth[slot][1:])["token"])
    tokens = host.memory["tokens"].cpu()
    for slot in slots:
        assert tokens[slot, :21].tolist() == truth[slot], f"slot {slot}: {tokens[slot, :21].tolist()} for {truth[slot]}"
    return "20 replays"


def check_errors():
    """Checks the error texts of GEMMs and decode attention for invalid arguments. ../bench checks their results."""
    x = rand(16, 4096, dtype=torch.bfloat16)
    at = x.data_ptr()

    def skinny(code, text, **changed):
        fields = dict(weight=at, x=at, x_stride=64, out=at, out_stride=64, rows=4, n=64, depth=64) | changed
        expect_error(code, text, lambda: lib.skinny_gemm(SkinnyArgs(**fields)))

    skinny(1, "rows is -1; expected 0 to", rows=-1)
    skinny(2, "rows is 4000; expected 0 to", rows=4000)
    skinny(1, "depth is 60; expected multiples of 8", depth=60)
    skinny(1, "n is 0", n=0)
    skinny(1, "n is 63; of gate and up it is even", n=63, epilogue=2)
    skinny(1, "epilogue is 5; expected 0 to 4", epilogue=5)
    skinny(1, "x_stride is 56; expected multiples of 8 from the depth, 64, on", x_stride=56)
    skinny(1, "out_stride is 63; expected 64 or more", out_stride=63)
    skinny(1, "tile is 24", tile=24)
    skinny(1, "weight_block is 64; expected 0, or 128 with scales", weight_block=64)
    skinny(1, "parts is 1; expected 0, or 1 or 2 with scales of the weight's rows", parts=1)
    skinny(1, "residual is null", epilogue=1)
    skinny(2, "head_dim is 24", epilogue=4, head_dim=24, n=72, query_heads=1, kv_heads=1)
    skinny(1, "n is 64; 1 and twice 1 heads of 16 make 48", epilogue=4, head_dim=16, query_heads=1, kv_heads=1)
    for rows in (1, 8, 16):
        args = SkinnyArgs(rows=rows, n=4096, depth=4096)
        assert lib.raw.baton_skinny_gemm_tile(c.byref(args)) in (16, 32, 64), "tile"
    assert lib.raw.baton_skinny_gemm_tile(c.byref(SkinnyArgs(rows=4000, n=64, depth=64))) == 0, "tile of many rows"
    assert lib.raw.baton_skinny_gemm_rows_max() >= 16

    def decode(code, text, **changed):
        fields = dict(q=at, q_stride=512, k=at, v=at, stride_block=8192, stride_head=1024, stride_token=64, pages=at,
                      page_indptr=at, kv_len=at, out=at, out_stride=512, partial=at, counters=at, rows=1, kv_heads=2,
                      group=4, head_dim=64, scale=1.0, kv_dtype=BF16) | changed
        expect_error(code, text, lambda: lib.decode_attention(DecodeArgs(**fields)))

    decode(2, "rows is 1025; expected 0 to 1024", rows=1025)
    decode(2, "group is 17; expected 1 to 16", group=17)
    decode(2, "head_dim is 96; expected 64, 128 or 256", head_dim=96)
    decode(1, "kv_dtype is 0; expected 1 (bf16) or 2 (FP8)", kv_dtype=0)
    decode(1, "stride_head is 1032; expected multiples of 16", kv_dtype=FP8, stride_head=1032)
    decode(1, "q_stride is 508; expected multiples of 8 from 512 on", q_stride=508)
    decode(1, "stride_token is 56; expected head_dim, 64", stride_token=56)
    decode(1, "an address is null", pages=None)
    assert lib.raw.baton_decode_attention_workspace(0, 8, 4, 128) >= 132 * 4 * 16 * 132 * 4
    assert lib.raw.baton_decode_attention_workspace(0, 8, 4, 96) == 0
    return ""


def check_dependent_launch():
    """Checks decode attention with early start after both possible predecessors: RoPE after a plain GEMM, and a skinny GEMM."""
    heads, kv_heads, dim, depth, rows, layers = 32, 8, 128, 1024, 40, 3
    arena, kv = kv_arena(rows * 40, layers, kv_heads, dim, torch.bfloat16, 0)
    arena.copy_(rand(*arena.shape, dtype=torch.bfloat16))
    width = (heads + 2 * kv_heads) * dim
    frequencies = rand(dim // 2).abs()
    sizes = lib.raw.baton_decode_attention_workspace(0, kv_heads, heads // kv_heads, dim)
    partial = torch.empty(sizes // 4, device="cuda")
    cases = 0
    for count, own_product in itertools.product((1, 8, rows), (False, True)):
        if own_product and count > lib.raw.baton_skinny_gemm_rows_max():
            continue
        sequences = Sequences([(1, random.randint(1, 600)) for _ in range(count)], range(rows * 40))
        arrays = sequences.step()
        counters = torch.zeros(count * kv_heads, dtype=torch.int32, device="cuda")
        x = rand(count, depth, dtype=torch.bfloat16)
        weights = [rand(width, depth, dtype=torch.bfloat16, scale=0.1) for _ in range(layers)]
        qkv, q, out = (torch.empty(count, n, dtype=torch.bfloat16, device="cuda") for n in (width, heads * dim, heads * dim))

        def step(pdl):
            outs = []
            for layer in range(layers):
                keys, values = arena[0, layer, 0], arena[0, layer, 1]
                strides = (arena.stride(0), arena.stride(3), arena.stride(4))
                if own_product:
                    lib.skinny_gemm(SkinnyArgs(
                        weight=weights[layer].data_ptr(), x=x.data_ptr(), x_stride=depth, out=q.data_ptr(), out_stride=heads * dim,
                        k=keys.data_ptr(), v=values.data_ptr(), stride_block=strides[0], stride_head=strides[1], stride_token=strides[2],
                        frequencies=frequencies.data_ptr(), positions=arrays.row_positions.data_ptr(),
                        destinations=arrays.row_destinations.data_ptr(), rows=count, n=width, depth=depth, epilogue=4,
                        query_heads=heads, kv_heads=kv_heads, head_dim=dim, pdl=pdl))
                else:
                    torch.mm(x, weights[layer].t(), out=qkv)
                    lib.raw.baton_programmatic_launch(pdl)
                    lib.rope_store_kv(kv, RopeArgs(
                        qkv.data_ptr(), q.data_ptr(), heads * dim, None, None, None, frequencies.data_ptr(),
                        arrays.row_positions.data_ptr(), arrays.row_destinations.data_ptr(), 1e-6, heads, layer, count,
                        dim, 0))
                lib.decode_attention(DecodeArgs(
                    q.data_ptr(), heads * dim, keys.data_ptr(), values.data_ptr(), *strides, arrays.page_indices.data_ptr(),
                    arrays.page_indptr.data_ptr(), arrays.kv_lengths.data_ptr(), out.data_ptr(), heads * dim,
                    partial.data_ptr(), counters.data_ptr(), count, kv_heads, heads // kv_heads, dim, 0, dim**-0.5, pdl=pdl,
                    kv_dtype=BF16))
                outs.append(out.clone())
            return torch.stack(outs)

        want = step(0)
        for _ in range(20):
            # Data that is read too early is wrong.
            last = torch.tensor([table[-1] for table in sequences.tables], device="cuda")
            saved = arena[last].clone()
            tokens = torch.tensor([(length - 1) % 16 for length in sequences.lengths], device="cuda")
            arena[last, :, :, :, tokens] = NAN
            q.fill_(NAN)
            out.fill_(NAN)
            got = step(1)
            equal(got, want, f"{count} rows, {'own' if own_product else 'plain'} product")
            arena[last] = saved
            cases += 1
    return f"{cases} runs"


def check_probe():
    x = torch.randint(-2**31, 2**31 - 1, (1_000_004,), dtype=torch.int32, device="cuda")
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    for count in (4, 1000, 1_000_004):
        sink.zero_()
        lib.read_stream(x, count * 4, sink)
        want = np.bitwise_xor.reduce(x[:count].cpu().numpy())
        assert sink.item() == want, f"read_stream of {count}"
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    lib.delay(3_000_000)
    end.record()
    end.synchronize()
    assert 2.9 < begin.elapsed_time(end) < 20, "delay"
    return ""


PARTS = dict(rows=check_rows, rope=check_rope, fp8_kv=check_fp8_kv, decode=check_decode, step=check_step, attention=check_attention,
             invariance=check_attention_invariance, sample=check_sample, step_graph=check_step_graph,
             errors=check_errors, probe=check_probe, dependent_launch=check_dependent_launch)


def main():
    global lib, memory, is_short
    path, *parts = sys.argv[1:]
    is_short = "--short" in parts
    parts = [part for part in parts if part != "--short"]
    seed = random.randrange(1 << 30)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    lib = Library(path)
    print(lib.raw.baton_build_info().decode(), "|", torch.cuda.get_device_name(), "| seed", seed)
    sizes = (U32 * 32)()
    count = lib.raw.baton_struct_sizes(sizes, 32)
    assert list(sizes)[:count] == [ctypes_size(kind()) for kind in STRUCTS], "struct sizes"
    begin = time.time()
    lib.initialise()
    print(f"initialise: {time.time() - begin:.2f} s")
    memory = AttentionMemory()
    failed = 0
    for is_programmatic in (0,) if is_short else (0, 1):
        lib.raw.baton_programmatic_launch(is_programmatic)
        for name in parts or PARTS:
            begin = time.time()
            try:
                note, verdict = PARTS[name](), "ok"
                torch.cuda.synchronize()
            except Exception as error:  # a sticky CUDA error fails all later cases too
                note, verdict, failed = f"{type(error).__name__}: {error}"[:600], "FAILED", failed + 1
            print(f"{'pdl ' if is_programmatic else '    '}{name:16} {verdict:7} {time.time() - begin:6.1f} s  {note}",
                  flush=True)
    print(f"{failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
