"""Runs a task of lm-evaluation-harness against a Baton router, and compares each loglikelihood with that of transformers.

Usage: lm_eval_client.py http://HOST:PORT
       lm_eval_client.py write    computes the expected values, which needs torch
The task has made-up questions in the form of ARC: each answer is scored by the log-probabilities of its tokens.
"""

import json
import os
import pathlib
import sys
import tempfile
import urllib.request

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

from gguf_tokenizer import FOLDER, WEIGHTS, save_tokenizer

EXPECTED = pathlib.Path(__file__).parent / "lm_eval_loglikelihoods.json"
DIFFERENCE_MAX = 1e-3
TASK = "made_up_arc"

QUESTIONS = [
    ("Which of these is a liquid at room temperature?", ["iron", "water", "wood", "oxygen"], 1),
    ("What do plants need to make their food?", ["sunlight", "sand", "plastic", "moonlight"], 0),
    ("Which animal lays eggs?", ["a dog", "a cow", "a hen", "a horse"], 2),
    ("What pulls a falling apple towards the ground?", ["magnetism", "friction", "light", "gravity"], 3),
    ("Wie heißt die Hauptstadt von Österreich?", ["Graz", "Wien", "Köln", "Zürich"], 1),
    ("Which planet is closest to the Sun?", ["Mercury", "Neptune", "the Moon, which is no planet", "Earth"], 0),
    ("What is 12 + 30?", ["42", "1230", "18", "forty-one"], 0),
    ("Which part of a plant takes up water from the soil?", ["the flower", "the leaves", "the roots", "the fruit"], 2),
]


def prompt_of(question):
    return f"Question: {question}\nAnswer:"


def write_expected():
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = save_tokenizer(pathlib.Path(folder))
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=WEIGHTS, dtype=torch.float32)
    expected = []
    for question, answers, _ in QUESTIONS:
        values = []
        for answer in answers:
            context = tokenizer.encode(prompt_of(question)).ids
            tokens = tokenizer.encode(f"{prompt_of(question)} {answer}").ids
            assert tokens[: len(context)] == context, answer
            with torch.no_grad():
                logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
            places = range(len(context), len(tokens))
            values.append(round(sum(logprobs[at - 1, tokens[at]].item() for at in places), 5))
        expected.append(values)
    EXPECTED.write_text(json.dumps(expected, indent=1) + "\n")


def evaluate(url, folder):
    """Returns the loglikelihoods of the answers to each question, and the accuracy."""
    import lm_eval

    tokenizer = save_tokenizer(folder)
    for question, answers, _ in QUESTIONS:
        text = f"{prompt_of(question)} {answers[-1]}"
        ours = json.load(urllib.request.urlopen(urllib.request.Request(
            f"{url}/tokenize", json.dumps({"prompt": text}).encode(), {"content-type": "application/json"}), timeout=60))
        assert ours["tokens"] == tokenizer.encode(text).ids, text
    questions = folder / "questions.jsonl"
    lines = [{"prompt": prompt_of(question), "answers": answers, "best": best} for question, answers, best in QUESTIONS]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(questions)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "answers",
        "doc_to_target": "best",
        "metric_list": [{"metric": "acc"}],
    }
    model = {"model": "smollm2-135m", "base_url": f"{url}/v1/completions", "tokenizer": str(folder),
             "tokenizer_backend": "huggingface", "num_concurrent": 4}
    results = lm_eval.simple_evaluate("local-completions", model_args=model, tasks=[task], bootstrap_iters=0)
    samples = sorted(results["samples"][TASK], key=lambda sample: sample["doc_id"])
    found = [[float(values[0]) for values in sample["filtered_resps"]] for sample in samples]
    return found, results["results"][TASK]["acc,none"]


def main(url):
    with tempfile.TemporaryDirectory() as folder:
        found, accuracy = evaluate(url, pathlib.Path(folder))
    expected = json.loads(EXPECTED.read_text())
    assert [len(values) for values in found] == [len(values) for values in expected], found
    pairs = [pair for both in zip(found, expected) for pair in zip(*both)]
    furthest = max(abs(here - there) for here, there in pairs)
    assert furthest <= DIFFERENCE_MAX, f"a loglikelihood differs by {furthest}: {found} {expected}"
    best = [values.index(max(values)) for values in expected]
    assert accuracy == sum(at == right for at, (*_, right) in zip(best, QUESTIONS)) / len(QUESTIONS), accuracy
    print(f"ok: {len(pairs)} loglikelihoods differ by at most {furthest:.1e}")


write_expected() if sys.argv[1] == "write" else main(sys.argv[1])
