#!/usr/bin/env python3
"""Collectives between this machine's GPUs, one process per GPU: collective.py LIBRARY [--ranks N] [--calls N] [--bench] [--json FILE]

Checks that every result is bit-equal to the sum in rank order, with randomly delayed ranks, eagerly and in replayed graphs.
Then checks the behaviour when a rank skips a call, the host stops the group, or a rank is killed. --bench times calls in graphs
and compares them with NCCL. Needs torch.
"""

import argparse
import ctypes
import json
import os
import random
import signal
import statistics
import sys
import time

import torch
import torch.multiprocessing as processes

from abi import DTYPES, AllReduceArgs, Group

ONE, TWO = 1, 2
MESSAGE_BYTES = 16 << 20


class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]


class Rank:
    """One process of the group."""

    def __init__(self, library, rank, ranks, exchange, timeout_ns):
        torch.cuda.set_device(rank)
        torch.zeros(1, device="cuda")
        self.rank, self.ranks, self.exchange = rank, ranks, exchange
        self.lib = ctypes.CDLL(library)
        self.lib.baton_group_arena_bytes.restype = ctypes.c_int64
        self.lib.baton_group_arena_bytes.argtypes = [ctypes.c_int32, ctypes.c_int64]
        self.lib.baton_last_error.restype = ctypes.c_char_p
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.check(self.lib.baton_initialise())
        self.fault = torch.zeros(16, dtype=torch.int32).pin_memory()
        group = self.group = Group(rank=rank, ranks=ranks, timeout_ns=timeout_ns, fault=self.fault.data_ptr(),
                                   arena_bytes=self.lib.baton_group_arena_bytes(ranks, MESSAGE_BYTES))
        address, handle = ctypes.c_uint64(), Handle()
        self.driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(group.arena_bytes))
        self.driver("cuIpcGetMemHandle", ctypes.byref(handle), address)
        for peer, other in enumerate(exchange(ctypes.string_at(ctypes.byref(handle), 64))):
            mapped = ctypes.c_uint64()
            if peer == rank:
                mapped = address
            else:
                self.driver("cuIpcOpenMemHandle_v2", ctypes.byref(mapped), Handle.from_buffer_copy(other), 1)
            group.arenas[peer] = mapped.value
        self.reset()

    def driver(self, name, *arguments):
        code = getattr(self.cuda, name)(*arguments)
        assert code == 0, f"{name}: {code}"

    def check(self, code):
        if code != 0:
            raise RuntimeError(f"({code}) {self.lib.baton_last_error().decode()}")

    def stream(self):
        return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def reset(self):
        torch.cuda.synchronize()
        self.exchange(None)
        self.check(self.lib.baton_group_reset(ctypes.byref(self.group), self.stream()))
        torch.cuda.synchronize()
        self.fault.zero_()
        self.exchange(None)

    def all_reduce(self, x, out, rows, width, algorithm=0, residual=None, weight=None, eps=1e-5, pdl=0):
        pointer = lambda tensor: None if tensor is None else tensor.data_ptr()
        args = AllReduceArgs(pointer(x), pointer(out), pointer(residual), pointer(weight), eps, DTYPES[x.dtype], rows,
                             width, algorithm, pdl)
        self.check(self.lib.baton_all_reduce(ctypes.byref(self.group), ctypes.byref(args), self.stream()))


class Numbers:
    """Data of every rank, known to all ranks. `move` changes the data on the device, so that replays of a graph differ."""

    def __init__(self, ranks, elements):
        generator = torch.Generator(device="cuda").manual_seed(7)
        self.state = torch.randint(-2**31, 2**31 - 1, (ranks, elements), dtype=torch.int32, device="cuda", generator=generator)
        self.f32 = torch.zeros(ranks, elements, dtype=torch.float32, device="cuda")
        self.bf16 = torch.zeros(ranks, elements, dtype=torch.bfloat16, device="cuda")
        self.move()

    def move(self):
        self.state.mul_(1664525).add_(1013904223)
        # Sign and fraction at random, 0.5 to 2.
        bits = (self.state & ~0x7F000000) | 0x3F000000
        self.f32.copy_(bits.view(torch.float32))
        self.bf16.copy_(self.f32)

    def of(self, dtype):
        return self.f32 if dtype == torch.float32 else self.bf16


def bits(x):
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def wanted(x):
    total = torch.zeros_like(x[0], dtype=torch.float32)
    for row in x:
        total += row.float()
    return total


class Checker:
    def __init__(self, rank, numbers, seed):
        self.rank, self.numbers = rank, numbers
        self.random = random.Random(seed)  # the same draws on all ranks
        self.mine = random.Random(seed * 1000 + rank.rank)
        self.wrong = torch.zeros(2, dtype=torch.int64, device="cuda")
        self.digest = torch.zeros(1, dtype=torch.int64, device="cuda")
        elements = numbers.state.shape[1]
        self.out = {dtype: torch.zeros(elements, dtype=dtype, device="cuda") for dtype in DTYPES}
        self.residual = torch.zeros(elements, device="cuda")
        self.weight = torch.rand(8192, device="cuda", generator=torch.Generator(device="cuda").manual_seed(3))

    def draw(self, most_elements):
        draw = self.random
        dtype = draw.choice((torch.bfloat16, torch.bfloat16, torch.float32))
        elements = min(most_elements, int(2 ** draw.uniform(3, 23))) // (2 if dtype == torch.float32 else 1)
        width = 8 * draw.choice((1, 8, 72, 128, 512, 1000, 1024, draw.randint(1, 1024)))
        width = max(8, min(width, elements // 8 * 8))
        rows = max(1, elements // width)
        offset = draw.randint(0, (self.numbers.state.shape[1] - rows * width) // 8) * 8
        return dtype, rows, width, offset

    def one(self, most_elements=1 << 21, may_sleep=True):
        """Makes one random call. The device counts wrong results."""
        draw, rank = self.random, self.rank
        dtype, rows, width, offset = self.draw(most_elements)
        count = rows * width
        x = self.numbers.of(dtype)[:, offset:offset + count]
        has_norm = draw.random() < 0.4
        algorithm = ONE if has_norm else draw.choice((0, ONE, TWO))
        if algorithm == ONE and count * x.element_size() * rank.ranks > 2 * MESSAGE_BYTES:
            algorithm = 0
        choice = dict(algorithm=algorithm, pdl=draw.choice((0, 1)))
        late, is_any_late = draw.randrange(rank.ranks), draw.random() < 0.3
        if may_sleep and is_any_late and late == rank.rank:
            torch.cuda._sleep(self.mine.randint(1, 40_000))
        out = self.out[dtype][:count]
        out.fill_(float("nan"))
        sum32 = wanted(x)
        own = x[rank.rank].clone()
        if not has_norm:
            is_inplace = draw.random() < 0.3
            target = own if is_inplace else out
            rank.all_reduce(own, target, rows, width, **choice)
            self.wrong[0] += (bits(target) != bits(sum32.to(dtype))).sum()
            self.digest += bits(target).long().sum()
        else:
            residual = self.residual[:count]
            before = residual.clone()
            weight = self.weight[:width]
            rank.all_reduce(own, out, rows, width, residual=residual, weight=weight, **choice)
            after = before + sum32
            self.wrong[0] += (bits(residual) != bits(after)).sum()
            grid = after.view(rows, width)
            norm = (grid * torch.rsqrt((grid * grid).mean(-1, keepdim=True) + 1e-5) * weight).flatten()
            bound = 1e-2 if dtype == torch.bfloat16 else 1e-5
            self.wrong[1] += ((out.float() - norm).abs() > bound * (1 + norm.abs())).sum() + out.isnan().sum()
            self.digest += bits(out).long().sum() + bits(residual).long().sum()
            residual.mul_(0.5)

    def finish(self, what, calls, begin):
        torch.cuda.synchronize()
        wrong, digests = self.wrong.tolist(), self.rank.exchange(self.digest.item())
        fault = self.rank.fault[0].item()
        assert wrong == [0, 0] and fault == 0, f"{what}: wrong {wrong}, fault {fault}"
        assert len(set(digests)) == 1, f"{what}: ranks differ: {digests}"
        if self.rank.rank == 0:
            print(f"ok  {what}: {calls} calls on {self.rank.ranks} ranks, bit-equal; {time.time() - begin:.1f} s", flush=True)


def check_special(rank):
    """Checks all kinds of NaN, infinities, and zeros of both signs."""
    for dtype, words in ((torch.bfloat16, torch.int16), (torch.float32, torch.int32)):
        top = 16 if dtype == torch.bfloat16 else 32
        infinity = 0x7F80 << (top - 16)
        values = [-1, -1, -2, (1 << (top - 1)) - 1, -(1 << (top - 1)), 0, infinity, infinity - (1 << (top - 1))]
        column = torch.tensor(values, dtype=words, device="cuda").repeat(64)
        x = column.view(dtype).clone() if rank.rank % 2 == 0 else column.roll(rank.rank).view(dtype).clone()
        all_x = [column.view(dtype) if r % 2 == 0 else column.roll(r).view(dtype) for r in range(rank.ranks)]
        want = wanted(torch.stack(all_x)).to(dtype)
        for algorithm in (ONE, TWO):
            out = torch.zeros_like(x)
            rank.all_reduce(x, out, 1, x.numel(), algorithm=algorithm)
            torch.cuda.synchronize()
            same = (out == want) | (out.isnan() & want.isnan())
            assert same.all(), f"special numbers, {dtype}, algorithm {algorithm}"
            digests = rank.exchange(bits(out).long().sum().item())
            assert len(set(digests)) == 1, "special numbers differ between ranks"
    if rank.rank == 0:
        print("ok  NaN, infinities and signed zeros", flush=True)


def check_errors(rank):
    x = torch.zeros(8, device="cuda")
    for expected, call in (
        ("width is", lambda: rank.all_reduce(x, x, 1, 1 << 20, residual=x, weight=x)),
        ("multiples of 8", lambda: rank.all_reduce(x, x, 1, 12)),
        ("arenas of", lambda: rank.all_reduce(x, x, 1 << 15, 1024)),
        ("a norm requires one-shot", lambda: rank.all_reduce(x, x, 1, 8, residual=x, weight=x, algorithm=TWO)),
    ):
        try:
            call()
        except RuntimeError as error:
            assert expected in str(error), error
        else:
            raise AssertionError(f"no error: {expected}")
    rank.all_reduce(x, x, 0, 8)
    if rank.rank == 0:
        print("ok  invalid arguments are rejected", flush=True)


def check_graphs(rank, numbers, calls, seed):
    begin, checker, done = time.time(), Checker(rank, numbers, seed), 0
    per_graph = 48
    while done < calls:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Mostly small messages, as in a decode step.
            most = 1 << 21 if checker.random.random() < 0.2 else 1 << 17
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for _ in range(per_graph):
                    checker.one(most)
                numbers.move()
            replays = min(max(1, (calls - done) // per_graph + 1), 400)
            for _ in range(replays):
                graph.replay()
            torch.cuda.synchronize()
        done += replays * per_graph
        del graph
    checker.finish("random sizes in graphs", done, begin)


def check_faults(rank):
    x, out = torch.ones(4096, device="cuda"), torch.zeros(4096, device="cuda")
    # A rank skips a call.
    rank.group.timeout_ns = 50_000_000
    rank.exchange(None)
    begin = time.time()
    if rank.rank != rank.ranks - 1:
        rank.all_reduce(x, out, 1, 4096)
        torch.cuda.synchronize()
        waited = time.time() - begin
        assert 0.04 < waited < 2 and rank.fault[0].item() == 1, (waited, rank.fault[0])
        begin = time.time()
        for _ in range(100):
            rank.all_reduce(x, out, 1, 4096)
            rank.all_reduce(x, out, 1, 4096, residual=out, weight=x)
            rank.all_reduce(x, out, 1, 4096, algorithm=TWO)
        torch.cuda.synchronize()
        assert time.time() - begin < 0.1, "a call after a fault waits"
    rank.reset()
    for algorithm in (ONE, TWO):
        rank.all_reduce(x, out, 1, 4096, algorithm=algorithm)
        torch.cuda.synchronize()
        assert (out == rank.ranks).all() and rank.fault[0].item() == 0
    # The host stops a wait.
    rank.group.timeout_ns = 60_000_000_000
    rank.exchange(None)
    if rank.rank != rank.ranks - 1:
        rank.all_reduce(x, out, 1, 4096)
        time.sleep(0.05)
        begin, other = time.time(), torch.cuda.Stream()
        rank.check(rank.lib.baton_group_stop(ctypes.byref(rank.group), ctypes.c_void_p(other.cuda_stream)))
        torch.cuda.synchronize()
        assert time.time() - begin < 1, f"stopping took {time.time() - begin} s"
    rank.reset()
    rank.all_reduce(x, out, 1, 4096)
    torch.cuda.synchronize()
    assert (out == rank.ranks).all()
    if rank.rank == 0:
        print("ok  time-out after a missing call, stop by the host, and reset", flush=True)


def check_killed(rank):
    """Kills the last rank by SIGKILL between calls. The other ranks must time out, and their GPUs must keep working."""
    x, out = torch.ones(1 << 16, device="cuda"), torch.zeros(1 << 16, device="cuda")
    rank.group.timeout_ns = 200_000_000
    rank.exchange(None)
    begin = time.time()
    while rank.fault[0].item() == 0:
        rank.all_reduce(x, out, 1, 1 << 16)
        if rank.rank == rank.ranks - 1 and time.time() - begin > 0.3:
            os.kill(os.getpid(), signal.SIGKILL)
        assert time.time() - begin < 20, "no fault was seen"
        time.sleep(0.0005)
    torch.cuda.synchronize()
    again = torch.ones(1 << 20, device="cuda")
    assert (again + again).sum().item() == 2 << 20
    if rank.rank == 0:
        print(f"ok  a killed rank is detected after {time.time() - begin - 0.3:.2f} s; the GPU remains usable", flush=True)


def graph_us(call, calls=60, replays=10, rounds=5):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(calls):
                call()
        times = []
        for _ in range(rounds):
            torch.cuda.synchronize()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()
            begin.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / calls / replays)
    return statistics.median(times)


def bench(rank, path):
    import torch.distributed as nccl
    nccl.init_process_group("nccl", rank=rank.rank, world_size=rank.ranks, device_id=torch.device("cuda", rank.rank))
    found = []

    def say(text, **values):
        found.append(values)
        if rank.rank == 0:
            print(text, flush=True)

    sizes = [8 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20, 16 << 20]
    for size in sizes:
        x = torch.ones(size // 2, dtype=torch.bfloat16, device="cuda") * 0
        theirs = graph_us(lambda: nccl.all_reduce(x))
        rank.exchange(None)
        times = {}
        for algorithm in (ONE, TWO):
            if algorithm == ONE and size * rank.ranks > 2 * MESSAGE_BYTES:
                continue
            for pdl in (0, 1):
                us = graph_us(lambda: rank.all_reduce(x, x, 1, size // 2, algorithm, pdl=pdl), calls=40, replays=10, rounds=5)
                found.append(dict(size=size, algorithm=algorithm, pdl=pdl, us=us))
                times[f"{'one' if algorithm == ONE else 'two'}{' pdl' if pdl else ''}"] = us
        words = "; ".join(f"{name} {us:.2f}" for name, us in times.items())
        say(f"{rank.ranks} ranks {size >> 10:6} KiB: nccl {theirs:.2f} us; {words}", size=size, nccl=theirs)
        assert rank.fault[0].item() == 0
    for width in (4096, 8192):
        for rows in (1, 8, 32, 128):
            x = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
            out, residual, weight = torch.zeros_like(x), torch.zeros(rows, width, device="cuda"), torch.ones(width, device="cuda")
            pointer = lambda tensor: ctypes.c_void_p(tensor.data_ptr())

            def separate(pdl, is_nccl=False):
                if is_nccl:
                    nccl.all_reduce(x)
                else:
                    rank.all_reduce(x, x, rows, width, pdl=pdl)
                rank.check(rank.lib.baton_add_rms_norm(1, pointer(residual), pointer(x), pointer(weight), ctypes.c_float(1e-5),
                                                       pointer(out), rows, width, rank.stream()))

            theirs = graph_us(lambda: separate(0, True))
            rank.exchange(None)
            times = {}
            for pdl in (0, 1):
                rank.lib.baton_programmatic_launch(pdl)
                times[f"apart{' pdl' if pdl else ''}"] = graph_us(lambda: separate(pdl))
                times[f"fused{' pdl' if pdl else ''}"] = graph_us(
                    lambda: rank.all_reduce(x, out, rows, width, residual=residual, weight=weight, pdl=pdl))
            rank.lib.baton_programmatic_launch(0)
            say(f"{rank.ranks} ranks norm {rows}x{width}: nccl and norm {theirs:.2f} us; " +
                "; ".join(f"{name} {us:.2f}" for name, us in times.items()), rows=rows, width=width, nccl=theirs, **times)
    if path and rank.rank == 0:
        with open(path, "w") as file:
            json.dump(found, file)
    nccl.destroy_process_group()


def run(index, options, gate, slots, failed):
    def exchange(value):
        """Returns all ranks' values after a barrier."""
        slots[index] = value
        gate.wait(120)
        values = [slots[rank] for rank in range(options.ranks)]
        gate.wait(120)
        return values

    rank = None
    try:
        rank = Rank(options.library, index, options.ranks, exchange, 10_000_000_000)
        if options.calls:
            check_errors(rank)
            check_special(rank)
            numbers = Numbers(options.ranks, 1 << 21)
            begin, checker = time.time(), Checker(rank, numbers, options.seed)
            for count in range(min(options.calls, 2000)):
                checker.one()
                if count % 50 == 0:
                    numbers.move()
            checker.finish("random sizes", min(options.calls, 2000), begin)
            check_graphs(rank, numbers, options.calls, options.seed + 1)
            check_faults(rank)
            rank.group.timeout_ns = 10_000_000_000
        if options.bench:
            bench(rank, options.json)
        if options.calls:
            check_killed(rank)
    except BaseException as error:
        failed.value = 1
        gate.abort()
        fault = rank.fault[0].item() if rank else None
        print(f"FAILED rank {index} (fault {fault}): {type(error).__name__}: {error}", flush=True)
        raise


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bench", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in os.environ:
        import socket
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    context = processes.get_context("spawn")
    gate, failed = context.Barrier(options.ranks), context.Value("i", 0)
    with context.Manager() as manager:
        slots = manager.dict()
        children = [context.Process(target=run, args=(rank, options, gate, slots, failed)) for rank in range(options.ranks)]
        for child in children:
            child.start()
        for child in children:
            child.join()
    codes = [child.exitcode for child in children]
    allowed = [0] * (options.ranks - 1) + [-signal.SIGKILL if options.calls else 0]
    if failed.value or codes != allowed:
        sys.exit(f"failed: the ranks ended with {codes}")
    print("all checks passed", flush=True)


if __name__ == "__main__":
    main()
