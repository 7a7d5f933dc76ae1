#!/usr/bin/env python3
"""Writes random Llama, Qwen2 and Qwen3 models in the format of transformers to FOLDER, each with a reference.safetensors that
transformers computes on this GPU: transformers_reference.py FOLDER

tokens.N holds prompt N and 32 greedy tokens, f32.N and bf16.N hold the logits of these tokens, and prompts holds the lengths of
the prompts. Needs torch with a GPU and transformers.
"""

import pathlib
import sys

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

STEPS = 32
PROMPTS = [5, 33, 130]
VOCABULARY = 1003
SHAPE = dict(num_hidden_layers=3, vocab_size=VOCABULARY, max_position_embeddings=512, rms_norm_eps=1e-5,
             bos_token_id=1, eos_token_id=2)
LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)
MODELS = {
    "llama": LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_size=256, intermediate_size=704, num_attention_heads=4,
                                          num_key_value_heads=2, rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "qwen2": Qwen2ForCausalLM(Qwen2Config(**SHAPE, hidden_size=512, intermediate_size=1024, num_attention_heads=4,
                                          num_key_value_heads=1, tie_word_embeddings=False)),
    "qwen3": Qwen3ForCausalLM(Qwen3Config(**SHAPE, hidden_size=256, intermediate_size=768, num_attention_heads=8,
                                          num_key_value_heads=2, head_dim=64, tie_word_embeddings=False)),
}


def randomise(model):
    """Activations and logits about 1, nothing at a default that hides a mistake, all exact in bf16."""
    for name, weight in model.named_parameters():
        if name.endswith(".bias"):
            values = torch.randn(weight.shape)
        elif weight.dim() == 1:
            values = 1 + 0.3 * torch.randn(weight.shape)
        else:
            values = torch.randn(weight.shape) / weight.shape[1] ** 0.5
        weight.data = values.to(torch.bfloat16).to(torch.float32)
    model.config._attn_implementation = "eager"


@torch.no_grad()
def logits(model, tokens):
    return model(torch.tensor([tokens], device="cuda"), use_cache=False).logits[0]


def main(folder):
    torch.manual_seed(17)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    for name, model in MODELS.items():
        randomise(model)
        model = model.to("cuda").eval()
        found = {"prompts": torch.tensor(PROMPTS, dtype=torch.int32)}
        for index, length in enumerate(PROMPTS):
            tokens = [(17 * i * i + 5 * i + 3 * index) % VOCABULARY for i in range(length)]
            for _ in range(STEPS):
                tokens.append(int(logits(model, tokens)[-1].argmax()))
            found[f"tokens.{index}"] = torch.tensor(tokens, dtype=torch.int32)
        for dtype, key in [(torch.float32, "f32"), (torch.bfloat16, "bf16")]:
            model = model.to(dtype)
            for index, length in enumerate(PROMPTS):
                row = logits(model, found[f"tokens.{index}"].tolist())[length - 1:-1]
                found[f"{key}.{index}"] = row.float().cpu().contiguous()
        place = folder / name
        model.save_pretrained(place)
        save_file(found, place / "reference.safetensors")


main(pathlib.Path(sys.argv[1]))
