#!/usr/bin/env python3
"""Writes a Hugging Face folder of a random Llama for load tests: random_model.py FOLDER [tiny|1b|8b|70b] [--weights].

Writes config.json and a byte-level tokenizer of the model's vocabulary size, which suffice for `--load-format dummy`. With
--weights also writes random bf16 weights as sharded safetensors (needs torch and safetensors, and 16 GB for 8b, 141 GB for 70b).
"""
import json
import pathlib
import sys

SIZES = {
    "tiny": dict(hidden_size=2048, intermediate_size=2048, num_hidden_layers=4, head_dim=64, tie_word_embeddings=False),
    "1b": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, head_dim=64, tie_word_embeddings=True),
    "8b": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, head_dim=128, tie_word_embeddings=False),
    "70b": dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, head_dim=128, tie_word_embeddings=False,
                num_attention_heads=64),
}
VOCABULARY = 128_256


def config(size):
    return dict(
        dict(num_attention_heads=32) | SIZES[size], architectures=["LlamaForCausalLM"], model_type="llama", num_key_value_heads=8,
        vocab_size=VOCABULARY, max_position_embeddings=131_072, rms_norm_eps=1e-5, rope_theta=500_000.0, hidden_act="silu",
        bos_token_id=VOCABULARY - 2, eos_token_id=VOCABULARY - 1, torch_dtype="bfloat16",
        rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                          original_max_position_embeddings=8192))


def tokenizer():
    """Every byte, every pair of bytes, and as many triples as there is room for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letter, extra = {}, 0
    for byte in range(256):
        if byte in printable:
            letter[byte] = chr(byte)
        else:
            letter[byte] = chr(256 + extra)
            extra += 1
    letters = [letter[byte] for byte in range(256)]
    vocabulary, merges = list(letters), []
    pairs = [(a, b) for a in letters for b in letters]
    triples = ((a + b, c) for a, b in pairs for c in letters)
    for left, right in [*pairs, *triples_of(triples, VOCABULARY - 2 - 256 - len(pairs))]:
        merges.append([left, right])
        vocabulary.append(left + right)
    special = [dict(id=VOCABULARY - 2 + i, content=content, single_word=False, lstrip=False, rstrip=False, normalized=False,
                    special=True) for i, content in enumerate(["<|begin|>", "<|end|>"])]
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    return dict(version="1.0", truncation=None, padding=None, added_tokens=special, normalizer=None, pre_tokenizer=level,
                post_processor=None, decoder=level,
                model=dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None,
                           fuse_unk=False, byte_fallback=False, ignore_merges=False,
                           vocab={text: i for i, text in enumerate(vocabulary)} | {s["content"]: s["id"] for s in special},
                           merges=merges))


def triples_of(triples, count):
    return [next(triples) for _ in range(count)]


def write_weights(folder, settings):
    import torch
    from safetensors.torch import save_file

    hidden, inner, dim = settings["hidden_size"], settings["intermediate_size"], settings["head_dim"]
    queries, keys = settings["num_attention_heads"] * dim, 8 * dim
    shapes = {"model.embed_tokens.weight": (VOCABULARY, hidden), "model.norm.weight": (hidden,)}
    if not settings["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCABULARY, hidden)
    for layer in range(settings["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shards, shard, total = [], {}, 0
    for name, shape in shapes.items():
        scale = 1.0 if len(shape) == 1 else shape[1] ** -0.5
        value = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, device=device) * scale
        shard[name] = value.to(torch.bfloat16).cpu()
        if sum(tensor.nbytes for tensor in shard.values()) > 4 << 30:
            shards, shard = [*shards, shard], {}
    shards = [*shards, shard] if shard else shards
    files = {}
    for index, shard in enumerate(shards, 1):
        file = f"model-{index:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file)
        files |= dict.fromkeys(shard, file)
        total += sum(tensor.nbytes for tensor in shard.values())
    index = dict(metadata=dict(total_size=total), weight_map=files)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def main():
    names = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    if not names or len(names) > 2 or (len(names) == 2 and names[1] not in SIZES):
        sys.exit(__doc__)
    folder, settings = pathlib.Path(names[0]), config(names[1] if len(names) == 2 else "8b")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings, indent=1))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
    if "--weights" in sys.argv:
        write_weights(folder, settings)


main()
