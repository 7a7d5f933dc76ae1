"""Writes the greedy tokens of a Llama model in f32 with numpy: cut_smollm2.py MODEL.gguf GOLDEN.json OUT.json

Takes the prompts and numbers of tokens from GOLDEN.json, and prints whether its tokens are those of the model. With the
whole model and smollm2_greedy.json, which transformers wrote, they are. Tests write the cut model to
target/debug/layers-8. Needs numpy and gguf.
"""
import json
import sys

import numpy as np
from gguf import GGUFReader, dequantize

model, golden, out = sys.argv[1:]
file = GGUFReader(model)
field = lambda name: file.fields[f"llama.{name}"].contents()
heads, kv_heads, layers = field("attention.head_count"), field("attention.head_count_kv"), field("block_count")
hidden, base, eps = field("embedding_length"), field("rope.freq_base"), field("attention.layer_norm_rms_epsilon")
dim = hidden // heads
weights = {t.name: dequantize(t.data, t.tensor_type).astype(np.float32).reshape([int(n) for n in reversed(t.shape)]) for t in file.tensors}


def norm(x, name):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps)) * weights[name]


def rotate(x, first):
    """Rotates adjacent pairs of x [tokens][heads][dim], as GGUF stores Llama's rows."""
    angles = np.arange(first, first + len(x))[:, None] * base ** (-np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angles).astype(np.float32)[:, None], np.sin(angles).astype(np.float32)[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)


def forward(tokens, kv, first):
    """Returns the logits after the last of these tokens. `kv` has K and V of the tokens before."""
    x = weights["token_embd.weight"][tokens]
    for layer in range(layers):
        w = lambda name: weights[f"blk.{layer}.{name}.weight"].T
        h = norm(x, f"blk.{layer}.attn_norm.weight")
        q = rotate((h @ w("attn_q")).reshape(len(tokens), heads, dim), first)
        k = rotate((h @ w("attn_k")).reshape(len(tokens), kv_heads, dim), first)
        v = (h @ w("attn_v")).reshape(len(tokens), kv_heads, dim)
        if layer < len(kv):
            k, v = np.concatenate([kv[layer][0], k]), np.concatenate([kv[layer][1], v])
            kv[layer] = (k, v)
        else:
            kv.append((k, v))
        repeat = heads // kv_heads
        scores = np.einsum("qhd,khd->hqk", q, k.repeat(repeat, 1)) / np.float32(np.sqrt(dim))
        scores[:, np.arange(len(k)) > first + np.arange(len(tokens))[:, None]] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", scores, v.repeat(repeat, 1)).reshape(len(tokens), hidden) @ w("attn_output")
        h = norm(x, f"blk.{layer}.ffn_norm.weight")
        gate = h @ w("ffn_gate")
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w("ffn_up"))) @ w("ffn_down")
    return norm(x[-1], "output_norm.weight") @ weights["token_embd.weight"].T


def greedy(prompt, count):
    kv, tokens, output, margins, first = [], list(prompt), [], [], 0
    while len(output) < count:
        logits = forward(tokens, kv, first)
        best, second = np.argsort(logits)[-1:-3:-1]
        output.append(int(best))
        margins.append(round(float(logits[best] - logits[second]), 4))
        first, tokens = first + len(tokens), [best]
    return output, margins


# GPT-2 writes each byte as a character.
printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
others = [byte for byte in range(256) if byte not in printable]
byte_of = {chr(c): b for b, c in [(b, b) for b in printable] + [(b, 256 + i) for i, b in enumerate(others)]}


def text(tokens):
    pieces = (vocabulary[token] for token in tokens)
    encoded = (bytes(byte_of[c] for c in piece) if all(c in byte_of for c in piece) else piece.encode() for piece in pieces)
    return b"".join(encoded).decode("utf-8", "replace")


vocabulary = file.fields["tokenizer.ggml.tokens"].contents()
document = json.load(open(golden))
runs = []
for run in document["runs"]:
    output, margins = greedy(run["prompt_ids"], len(run["output_ids"]))
    print(run["name"], "equal" if output == run["output_ids"] else "other tokens", "smallest margin", min(margins), flush=True)
    runs.append(dict(name=run["name"], prompt=run["prompt"], prompt_ids=run["prompt_ids"], output_ids=output,
                     output_text=text(output), top1_top2_margin_per_step=margins))
head = dict(model="SmolLM2-135M-Instruct.Q4_1.gguf with layers 0 to 3 and 26 to 29, dequantised exactly to f32",
            engine="cut_smollm2.py: numpy, CPU, f32", sampling=document["sampling"], runs=runs)
json.dump(head, open(out, "w"))
