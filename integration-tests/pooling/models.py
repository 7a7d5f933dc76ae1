#!/usr/bin/env python3
"""Writes tiny random models next to itself, in the form of Qwen3-Embedding, e5-mistral and Qwen3-Reranker, and
golden.json with the embeddings and scores that transformers computes from these folders.

Needs torch, transformers 5.24 and safetensors. Weights are rounded to bf16 before they are used, so that the files hold
them exactly in half the space.
"""

import json
import pathlib

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (AutoModel, AutoModelForCausalLM, AutoTokenizer, MistralConfig, MistralModel,
                          PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3Model)

HERE = pathlib.Path(__file__).parent
SHAPE = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, vocab_size=272, max_position_embeddings=512, rms_norm_eps=1e-5,
             bos_token_id=256, eos_token_id=257)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>"]
MERGES = ["t h", "th e", "Ġ the", "i n", "a n", "e r", "Ġ a", "o f"]
TEXTS = ["The capital of France is Paris.", "a", "", "Größe 😀 <|im_end|>", "the other thing " * 12]
QUERY = "What is the capital of France?"
DOCUMENTS = ["Paris is the capital.", "Rome", "", "the other thing " * 12]
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
TEMPLATE = """{%- set system = messages | selectattr("role", "equalto", "system") | map(attribute="content") | first -%}
<|im_start|>system
Judge the Document by the Query and the Instruct. Answer yes or no.<|im_end|>
<|im_start|>user
<Instruct>: {{ system }}
<Query>: {{ messages | selectattr("role", "equalto", "query") | map(attribute="content") | first }}
<Document>: {{ messages | selectattr("role", "equalto", "document") | map(attribute="content") | first }}<|im_end|>
<|im_start|>assistant
<think>

</think>


"""


def tokenizer(first, last):
    """Returns a byte-level tokenizer that puts the special tokens `first` and `last` around a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(alphabet)}
    for index, token in enumerate(SPECIAL):
        vocab[token] = 256 + index
    for merge in MERGES:
        vocab["".join(merge.split())] = len(vocab)
    built = Tokenizer(models.BPE(vocab, [tuple(merge.split()) for merge in MERGES]))
    built.add_special_tokens(SPECIAL)
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    around = processors.TemplateProcessing(
        single=" ".join(filter(None, [first, "$A", last])),
        special_tokens=[(token, vocab[token]) for token in (first, last) if token])
    built.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), around])
    return PreTrainedTokenizerFast(tokenizer_object=built, eos_token=last or "<|im_end|>", pad_token="<|endoftext|>")


def randomise(model):
    """Sets random weights. No weight keeps a default, which could hide a bug."""
    for weight in model.parameters():
        noise = torch.randn(weight.shape)
        values = 1 + 0.3 * noise if weight.dim() == 1 else noise / weight.shape[1] ** 0.5
        weight.data = values.to(torch.bfloat16).to(torch.float32)
    return model


def write(name, model, words, architecture, files):
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    words.save_pretrained(folder)
    model.config.architectures = [architecture]
    model.config.dtype = "bfloat16"
    model.config.save_pretrained(folder)
    # A tied output is not stored.
    weights = {key: value.to(torch.bfloat16).contiguous() for key, value in model.state_dict().items()
               if not (key == "lm_head.weight" and model.config.tie_word_embeddings)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for file, content in files.items():
        path = folder / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content, indent=2) + "\n")
    return folder


def modules(*kinds):
    return [{"idx": index, "name": str(index), "path": f"{index}_{kind}" if index else "",
             "type": f"sentence_transformers.models.{kind}"} for index, kind in enumerate(kinds)]


def pooling():
    modes = ["cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"]
    return {"word_embedding_dimension": 32, "include_prompt": True,
            **{f"pooling_mode_{mode}": mode == "lasttoken" for mode in modes}}


@torch.no_grad()
def embeddings(folder, prefix):
    words, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder, dtype=torch.float32)
    model.config._attn_implementation = "eager"
    rows = []
    for text in TEXTS:
        ids = words(prefix + text)["input_ids"]
        hidden = model(torch.tensor([ids]), use_cache=False).last_hidden_state[0, -1]
        rows.append(dict(text=text, tokens=ids, embedding=torch.nn.functional.normalize(hidden, dim=0).tolist()))
    return rows


@torch.no_grad()
def scores(folder, yes, no):
    words, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config._attn_implementation = "eager"
    rows = []
    for document in DOCUMENTS:
        messages = [dict(role="system", content=INSTRUCTION), dict(role="query", content=QUERY),
                    dict(role="document", content=document)]
        prompt = words.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = words(prompt, add_special_tokens=False)["input_ids"]
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        rows.append(dict(document=document, tokens=len(ids), score=torch.softmax(logits[[yes, no]], 0)[0].item()))
    return rows


torch.manual_seed(7)
prompts = {"query": f"Instruct: {INSTRUCTION}\nQuery:", "document": ""}
embedding_files = {"modules.json": modules("Transformer", "Pooling", "Normalize"), "1_Pooling/config.json": pooling()}
qwen3 = Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True)
config = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
embedding = write("qwen3_embedding", randomise(Qwen3Model(qwen3)), tokenizer(None, "<|endoftext|>"), "Qwen3ForCausalLM",
                  embedding_files | {"config_sentence_transformers.json": config})
mistral = MistralConfig(**SHAPE, head_dim=8, sliding_window=7, tie_word_embeddings=False)
config = {"prompts": {"web_search_query": prompts["query"] + " "}, "default_prompt_name": None}
e5 = write("e5_mistral", randomise(MistralModel(mistral)), tokenizer("<s>", "</s>"), "MistralModel",
           embedding_files | {"config_sentence_transformers.json": config})
words = tokenizer(None, None)
yes, no = (words.convert_tokens_to_ids(letter) for letter in "yn")
config = {"prompts": {"web_search": INSTRUCTION}, "default_prompt_name": "web_search"}
reranker = write("qwen3_reranker", randomise(Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16))), words,
                 "Qwen3ForCausalLM", {
                     "modules.json": modules("Transformer", "LogitScore"),
                     "1_LogitScore/config.json": {"true_token_id": yes, "false_token_id": no},
                     "config_sentence_transformers.json": config, "chat_template.jinja": TEMPLATE})
golden = dict(query=QUERY, qwen3_embedding=embeddings(embedding, ""), qwen3_query=embeddings(embedding, prompts["query"]),
              e5_mistral=embeddings(e5, ""), qwen3_reranker=scores(reranker, yes, no))
(HERE / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")
