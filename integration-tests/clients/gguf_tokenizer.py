"""The tokenizer of SmolLM2 in the form of Hugging Face, for clients that count or split tokens themselves."""

import json
import pathlib

FOLDER = pathlib.Path(__file__).parent.parent.parent / "models/smollm2-135m"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def save_tokenizer(folder):
    """Writes the tokenizer of the GGUF file to a folder, and returns it."""
    import gguf
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    fields = gguf.GGUFReader(FOLDER / WEIGHTS).fields
    names, kinds, merges = (fields[f"tokenizer.ggml.{key}"].contents() for key in ["tokens", "token_type", "merges"])
    vocabulary = {name: token for token, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    control = gguf.TokenType.CONTROL
    tokenizer.add_special_tokens([AddedToken(name) for name, kind in zip(names, kinds) if kind == control])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tokenizer
