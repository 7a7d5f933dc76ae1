#!/usr/bin/env python3
"""Latencies of the kernels at the shapes of Llama-3.1-8B's decode steps: bench.py LIBRARY

Each time is the mean of many calls in a replayed graph. Each attention call uses another layer, so that its KV comes from
memory. The other kernels read the output of the previous kernel, as in a step.
"""

import sys

import torch

import check
from abi import *
from check import GREEDY, Host, rand

HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS, VOCABULARY = 4096, 14336, 32, 8, 128, 32, 128_256


def microseconds(call, repeats=32, replays=8):
    """Returns the latency of one call(i)."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        for i in range(repeats):
            call(i)
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / repeats / replays


def bandwidth(lib):
    gigabytes = 8
    source = torch.empty(gigabytes << 28, dtype=torch.float32, device="cuda").uniform_(-1, 1)
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    time = microseconds(lambda i: lib.read_stream(source, source.numel() * 4, sink), 2, 3)
    print(f"read stream, {gigabytes} GiB: {source.numel() * 4 / time / 1e3:.0f} GB/s")
    other = torch.empty_like(source[: source.numel() // 2])
    time = microseconds(lambda i: other.copy_(source[: other.numel()]), 2, 3)
    print(f"copy, 4 GiB, both ways counted: {other.numel() * 8 / time / 1e3:.0f} GB/s")


def small(lib, batch):
    times = {}
    bf16 = torch.bfloat16
    residual, delta = rand(batch, HIDDEN), rand(batch, HIDDEN, dtype=bf16, scale=0.01)
    weight, out = rand(HIDDEN), torch.empty(batch, HIDDEN, dtype=bf16, device="cuda")
    times["add_rms_norm"] = microseconds(lambda i: lib.add_rms_norm(1, residual, delta, weight, 1e-5, out, batch, HIDDEN))
    gate_up, inner = rand(batch, 2 * INNER, dtype=bf16), torch.empty(batch, INNER, dtype=bf16, device="cuda")
    times["activate"] = microseconds(lambda i: lib.activate(1, 0, gate_up, inner, batch, INNER))
    table = torch.zeros(VOCABULARY, HIDDEN, dtype=bf16, device="cuda")
    ids = torch.randint(0, VOCABULARY, (batch,), dtype=torch.int32, device="cuda")
    times["embed"] = microseconds(lambda i: lib.embed(1, table, 0, VOCABULARY, 1.0, ids, residual, batch, HIDDEN))
    del table
    arena, kv = check.kv_arena(batch + 1, LAYERS, KV_HEADS, DIM, bf16, 0)
    qkv, queries = rand(batch, (HEADS + 2 * KV_HEADS) * DIM, dtype=bf16), torch.empty(batch, HEADS * DIM, dtype=bf16, device="cuda")
    frequencies, positions = rand(DIM // 2), ints([512] * batch)
    destinations = ints([i * 16 for i in range(batch)])
    arguments = [RopeArgs(qkv.data_ptr(), queries.data_ptr(), HEADS * DIM, None, None, None, frequencies.data_ptr(),
                          positions.data_ptr(), destinations.data_ptr(), 1e-6, HEADS, layer, batch, DIM, 0) for layer in range(LAYERS)]
    times["rope_store_kv"] = microseconds(lambda i: lib.rope_store_kv(kv, arguments[i % LAYERS]))

    host = Host(batch, 8200, batch * 40 + 2, 1)
    host.free *= 20
    arrays = StepArrays(batch, batch, batch * 520, batch)
    slots = list(range(batch))
    buffer = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
    plan = host.write(0, [host.admission(slot, [1] * 520, 512) for slot in slots], [])
    buffer[: len(plan)] = plan.cuda()
    lib.step_prepare(host.pool, buffer, arrays.struct, 0, 0, 0, 0)
    plan = host.write(0, [], [(slot, 1, 1, -1) for slot in slots])
    buffer[: len(plan)] = plan.cuda()
    times["step_prepare"] = microseconds(lambda i: lib.step_prepare(host.pool, buffer, arrays.struct, batch, batch, batch, 0), 8, 1)
    scratch = torch.zeros(lib.raw.baton_group_sample_scratch_bytes(1, batch, VOCABULARY) // 4, dtype=torch.int32, device="cuda")
    results = torch.zeros(batch, 8, dtype=torch.int32, device="cuda")
    top = torch.zeros(batch, TOP_MAX, 2, dtype=torch.int32, device="cuda")
    arrays.fill(row_positions=[512] * batch, sampled_rows=slots, sample_slots=slots, sample_masks=[-1] * batch)
    for name, logits, how, *needs in (
            ("sample greedy", 2.0, {}), ("sample greedy, needed alone", 2.0, {}, 0),
            ("sample greedy + penalties, needed alone", 2.0, dict(repetition_penalty=1.1), NEEDS_PENALTIES),
            ("sample T=1", 2.0, dict(temperature=1.0)), ("sample T=1, needed alone", 2.0, dict(temperature=1.0), NEEDS_DRAW),
            ("sample top-p 0.9", 2.0, dict(temperature=0.7, top_p=0.9)),
            ("sample top-k 50", 2.0, dict(temperature=0.7, top_k=50)),
            ("sample top-k 50, sharp", 6.0, dict(temperature=0.7, top_k=50)),
            ("sample top-p 0.9, flat", 0.05, dict(temperature=1.0, top_p=0.9)),
            ("sample greedy + 5 logprobs", 2.0, dict(logprobs=5)),
            ("sample T=1 + penalties", 2.0, dict(temperature=1.0, repetition_penalty=1.1))):
        values = torch.randn(batch, VOCABULARY, device="cuda") * logits
        words = list((I32 * 16).from_buffer_copy(Sampling(**(GREEDY | how), stop_count=0, prompt_len=500)))
        host.memory["sampling"].copy_(torch.tensor(words * batch, dtype=torch.int32))
        args = SampleArgs(values.data_ptr(), VOCABULARY, None, results.data_ptr(), top.data_ptr(), scratch.data_ptr(),
                          scratch.numel() * 4, VOCABULARY, batch, needs[0] if needs else NEEDS_ALL, 0)
        times[name] = microseconds(lambda i: lib.sample(host.pool, arrays.struct, args), 8, 3)
    return times


def decode(lib, batch, length, heads=HEADS):
    layers = LAYERS if batch * length < 200_000 else 8
    pages = batch * (length // 16)
    arena, kv = check.kv_arena(pages + 1, layers, KV_HEADS, DIM, torch.bfloat16, 0)
    arena.uniform_(-1, 1)
    sequences = Sequences([(1, length)] * batch, range(pages), trash=pages)
    arrays, shape = sequences.step(), Shape(heads, KV_HEADS, DIM, 1, 0, DIM**-0.5)
    queries = rand(batch, heads, DIM, dtype=torch.bfloat16)
    out, found = torch.empty_like(queries), []
    for kind in (FA2, PLAIN) if batch * length < 100_000 else (FA2,):
        plan = AttentionPlan()
        torch.cuda.synchronize()
        lib.attention_prepare(kind, shape, sequences.batch(), check.memory.struct, plan)
        torch.cuda.synchronize()
        time = microseconds(lambda i: lib.attention_run(plan, shape, check.memory.struct, kv, i % layers, queries,
                                                        heads * DIM, arrays.struct, None, out, batch, batch), layers, 3)
        read = batch * length * 2 * KV_HEADS * DIM * 2
        found.append(f"{check.ATTENTION_NAMES[kind]} {time:.1f} us = {read / time / 1e3:.0f} GB/s")
    print(f"decode attention {batch} x {length}, {heads}/{KV_HEADS} heads: " + ", ".join(found), flush=True)


def prefill(lib, shapes):
    pages = sum((length + 15) // 16 for _, length in shapes)
    arena, kv = check.kv_arena(pages + 1, 2, KV_HEADS, DIM, torch.bfloat16, 0)
    arena.uniform_(-1, 1)
    sequences = Sequences(shapes, range(pages), trash=pages)
    arrays, shape = sequences.step(), Shape(HEADS, KV_HEADS, DIM, 1, 0, DIM**-0.5)
    queries = rand(sequences.rows, HEADS, DIM, dtype=torch.bfloat16)
    out, found = torch.empty_like(queries), []
    for kind in (FA2, FA3):
        plan = AttentionPlan()
        torch.cuda.synchronize()
        lib.attention_prepare(kind, shape, sequences.batch(), check.memory.struct, plan)
        torch.cuda.synchronize()
        time = microseconds(lambda i: lib.attention_run(plan, shape, check.memory.struct, kv, i % 2, queries, HEADS * DIM,
                                                        arrays.struct, None, out, sequences.count, sequences.rows), 4, 2)
        work = sum(4 * HEADS * DIM * (rows * length - rows * (rows - 1) / 2) for rows, length in shapes)
        found.append(f"{check.ATTENTION_NAMES[kind]} {time:.0f} us = {work / time / 1e6:.0f} TFLOP/s")
    print(f"prefill attention {shapes[0]} .. {len(shapes)} sequences: " + ", ".join(found), flush=True)


def main():
    lib = check.lib = Library(sys.argv[1])
    lib.initialise()
    check.memory = AttentionMemory()
    bandwidth(lib)
    torch.cuda.empty_cache()
    batches = (1, 8, 32, 128)
    for is_programmatic in (0, 1):
        lib.raw.baton_programmatic_launch(is_programmatic)
        columns = [small(lib, batch) for batch in batches]
        print(f"us, programmatic launch {'on' if is_programmatic else 'off'}; batch {batches}")
        for name in columns[0]:
            print(f"  {name:40}" + "".join(f"{column[name]:9.2f}" for column in columns), flush=True)
    lib.raw.baton_programmatic_launch(0)
    for batch, length in ((1, 512), (8, 512), (32, 512), (128, 512), (1, 8192), (32, 8192)):
        decode(lib, batch, length)
        torch.cuda.empty_cache()
    for group in (1, 2, 3):
        for batch, length in ((1, 8192), (32, 512), (128, 2048)):
            decode(lib, batch, length, group * KV_HEADS)
            torch.cuda.empty_cache()
    for shapes in ([(8192, 8192)], [(2048, 2048)] * 4, [(512, 512)] * 16, [(64, 64)] * 64,
                   [(2048, 2048)] + [(1, 512)] * 32, [(512, 512)] + [(1, 512)] * 32):
        prefill(lib, shapes)


if __name__ == "__main__":
    main()
