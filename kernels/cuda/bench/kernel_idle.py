"""Prints the idle fraction of a GPU from a trace of kernel_trace.cpp: python3 kernel_idle.py FILE [FIRST LAST]

Covers the traced kernels from fraction FIRST (default 0.6) to fraction LAST (default 0.95). Gaps inside replayed graphs and
between steps both count as idle. Overlapping kernels count once.
"""
import collections
import sys

path, first, last = sys.argv[1], float((sys.argv + [0] * 4)[2] or 0.6), float((sys.argv + [0] * 4)[3] or 0.95)
kernels, begun, ranges = [], {}, collections.defaultdict(list)
with open(path) as lines:
    for line in lines:
        if line.startswith("#"):
            _, at, number, name = line.rstrip("\n").split(" ", 3)
            if name:
                begun[number] = int(at), name
            elif number in begun:
                begin, name = begun.pop(number)
                ranges[name].append(int(at) - begin)
            continue
        begin, end, name = line.rstrip("\n").split(" ", 2)
        kernels.append((int(begin), int(end), name))
kernels.sort()
kernels = kernels[int(len(kernels) * first):int(len(kernels) * last)]
if not kernels:
    sys.exit(f"{path} holds no kernels there")
idle, until, gaps = 0, kernels[0][0], collections.Counter()
busy = collections.defaultdict(lambda: [0, 0])
for begin, end, name in kernels:
    if begin > until:
        gap = begin - until
        idle += gap
        gaps[f"{1 << max(gap - 1, 0).bit_length():>8} ns"] += gap
    own = max(0, end - max(begin, until))
    until = max(until, end)
    busy[name][0] += 1
    busy[name][1] += own
span = until - kernels[0][0]
print(f"{len(kernels)} kernels in {span / 1e6:.2f} ms, idle {idle / 1e6:.3f} ms = {100 * idle / span:.2f} %")
print("idle time by length of the gap (up to): " + ", ".join(f"{k.strip()} {v / 1e6:.3f} ms" for k, v in sorted(gaps.items())))
for name, (count, ns) in sorted(busy.items(), key=lambda item: -item[1][1])[:16]:
    print(f"{count:8} {ns / 1e6:10.3f} ms {ns / count / 1e3:8.2f} us  {name[:90]}")
for name, times in sorted(ranges.items()):
    times = sorted(times[int(len(times) * first):int(len(times) * last)])
    if times:
        print(f"range {name}: {len(times)} times, median {times[len(times) // 2] / 1e3:.1f} us, longest {times[-1] / 1e3:.1f}")
