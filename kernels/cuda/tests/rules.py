"""Sampling rules of kernels/src/cpu/sample in numpy: the reference for the device."""

import numpy as np

f32, f64 = np.float32, np.float64
M64 = (1 << 64) - 1


def exp(x):
    """Computes e^x as kernels/src/cpu/arithmetic.rs does, operation by operation."""
    x = np.asarray(x, dtype=f32)
    is_zero = x < f32(-87)
    x = np.where(is_zero, f32(0), x)
    shifted = x * f32(1.44269504088896340736) + f32(12582912.0)
    power = shifted - f32(12582912.0)
    rest = (x - power * f32(0.6933594)) - power * f32(-2.1219444e-4)
    total = f32(1.9875691e-4)
    for coefficient in (1.3981999e-3, 8.333452e-3, 4.1665796e-2, 0.16666666, 0.5):
        total = total * rest + f32(coefficient)
    value = (total * (rest * rest) + rest) + f32(1)
    bits = ((shifted.view(np.uint32) + np.uint32(127)) << np.uint32(23)).astype(np.uint32)
    return np.where(is_zero, f32(0), value * bits.view(f32))


def splitmix64(x):
    x = (x + 0x9E3779B97F4A7C15) & M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
    return x ^ (x >> 31)


def triple32(x):
    x = x.astype(np.uint32)
    for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(14))


def arrivals(seed, index, ids, weights):
    key = splitmix64((splitmix64(seed) + index) & M64)
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
    bits = triple32(triple32(ids.astype(np.uint32) ^ low) ^ high)
    v = (bits.astype(f64) + 0.5) / 4294967296.0
    return -np.log1p(-v) / weights.astype(f64)


assert [int(triple32(triple32(np.array([i], np.uint32) ^ np.uint32(k & 0xFFFFFFFF)) ^ np.uint32(k >> 32))[0])
        for k in [splitmix64((splitmix64(42) + 7) & M64)] for i in range(3)] == [500478835, 4053914327, 3711117863]


def total(weights, floor):
    """Returns the sum of the weights: runs of 1,024 in 16 lanes each, and the runs in f64."""
    kept = np.where(weights >= f32(floor), weights, f32(0)).astype(f32)
    runs = np.zeros((-len(kept) // 1024 * -1, 64, 16), f32)
    runs.reshape(-1)[: len(kept)] = kept
    lanes = np.zeros((len(runs), 16), f32)
    for row in range(64):
        lanes = lanes + runs[:, row]
    width = 8
    while width:
        lanes[:, :width] = lanes[:, :width] + lanes[:, width : 2 * width]
        width //= 2
    whole = 0.0
    for run in lanes[:, 0]:
        whole += float(run)
    return whole


def adjust(logits, how, prompt, output, mask, stops):
    adjusted = logits.copy()
    if mask is not None:
        adjusted[~mask] = -np.inf
    if len(output) < how["min_tokens"]:
        for token in stops:
            if token < len(adjusted):
                adjusted[token] = -np.inf
    repeats = how["repetition_penalty"] != 1
    if repeats or how["presence_penalty"] or how["frequency_penalty"]:
        places = {}
        for token in prompt if repeats else ():
            places.setdefault(token, 0)
        for token in output:
            places[token] = places.get(token, 0) + 1
        for token, count in places.items():
            if not 0 <= token < len(adjusted):
                continue
            logit, penalty = adjusted[token], f32(how["repetition_penalty"])
            logit = logit / penalty if logit > 0 else logit * penalty
            logit = logit - f32(how["frequency_penalty"]) * f32(count)
            if count:
                logit = logit - f32(how["presence_penalty"])
            adjusted[token] = logit
    return adjusted


def status(logits):
    """Returns (status, token)."""
    bad = np.isnan(logits) | (logits == np.inf)
    if bad.any():
        return 1, int(np.argmax(bad))
    if logits.size == 0 or logits.max() == -np.inf:
        return 2, -1
    return 0, int(np.argmax(logits))


def sample(logits, how, prompt=(), output=(), mask=None, stops=()):
    """Returns dict(status, token, chosen, top)."""
    with np.errstate(all="ignore"):
        return _sample(logits, how, prompt, output, mask, stops)


def _sample(logits, how, prompt, output, mask, stops):
    code, token = status(logits)
    if code:
        return dict(status=code, token=token)
    raw_best = logits[token]
    adjusted = adjust(logits, how, prompt, output, mask, stops)
    code, best = status(adjusted)
    if code:
        return dict(status=code, token=best)
    token = best
    if f32(how["temperature"]) >= f32(1e-5):
        weights = exp((adjusted - adjusted[best]) / f32(how["temperature"]))
        min_p, top_p, top_k = f32(how["min_p"]), f32(how["top_p"]), how["top_k"]
        top_k = 0 if top_k >= len(weights) else top_k
        ids = np.flatnonzero((weights > 0) & (weights >= min_p))
        if top_k or top_p < 1:
            ids = ids[np.lexsort((ids, -weights[ids].astype(f64)))]
            if top_k and top_k < len(ids):
                ids = ids[: int(np.searchsorted(-weights[ids], -weights[ids[top_k - 1]], side="right"))]
            if top_p < 1:
                sums = np.cumsum(weights[ids].astype(f64))
                whole = float(sums[-1]) if top_k else total(weights, min_p)
                reached = np.flatnonzero(sums >= float(top_p) * whole)
                if len(reached):
                    ids = ids[: reached[0] + 1]
        times = arrivals(how["seed"], len(output), ids, weights[ids])
        token = int(ids[np.lexsort((ids, times))[0]])
    result = dict(status=0, token=token)
    if how["logprobs"] >= 0:
        log_total = np.log(total(exp((logits - raw_best) / f32(1)), 0))
        of = lambda i: f32(float(logits[i]) - float(raw_best) - log_total)
        order = np.lexsort((np.arange(len(logits)), -logits.astype(f64)))[: min(how["logprobs"], 32)]
        result.update(chosen=of(token), top=[(int(i), of(i)) for i in order])
    return result
