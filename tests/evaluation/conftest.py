"""A small CORE bundle, a tokenizer of bytes and a model that is no network."""

import json

import pytest
import torch

BOS = 256


class ByteTokenizer:
    """One token a byte."""

    def get_bos_token_id(self):
        return BOS

    def encode(self, text):
        return list(text.encode())

    @staticmethod
    def text(ids):
        return bytes(token for token in ids if token != BOS).decode()


class TableModel:
    """Logits that depend on the token, the one before it and the position; counts what it was asked."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.here, self.before = (torch.randn(257, 257, generator=generator) for _ in range(2))
        self.calls, self.tokens = 0, 0

    def __call__(self, ids):
        self.calls, self.tokens = self.calls + 1, self.tokens + ids.numel()
        previous = torch.nn.functional.pad(ids, (1, 0))[:, :-1]
        place = torch.arange(ids.shape[1]).sin()[:, None]
        return self.here[ids] + self.before[previous] * place


ENTRIES = [
    ("choose", "multiple_choice", 2, {"continuation_delimiter": "\nAnswer: "}, 25),
    ("pronoun", "schema", 0, {}, 50),
    ("continue", "language_modeling", 3, {}, 0),
]


def default_examples():
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [letters[i : i + 3 + i % 4] for i in range(12)]
    return {
        "choose": [
            {"query": f"Q {word}?", "choices": [word, word[::-1], "yes " * (i % 3 + 1)], "gold": i % 3}
            for i, word in enumerate(words)
        ],
        "pronoun": [
            {"context_options": [f"{word} and", f"the {word[::-1]} and more"], "continuation": f"so {i}", "gold": i % 2}
            for i, word in enumerate(words[:9])
        ],
        "continue": [{"context": f"  say {word} \n", "continuation": word * 2} for word in words[:7]],
    }


def write_bundle(folder, examples=None, entries=ENTRIES):
    """Writes a bundle of three tasks."""
    folder.mkdir()
    (folder / "eval_data" / "some").mkdir(parents=True)
    examples = default_examples() | (examples or {})
    tasks = []
    for label, kind, shots, more, _ in entries:
        uri = f"some/{label}.jsonl"
        tasks.append({"label": label, "dataset_uri": uri, "num_fewshot": [shots], "icl_task_type": kind} | more)
        lines = [json.dumps(example) for example in examples[label]]
        (folder / "eval_data" / uri).write_text("\n".join(lines) + "\n")
    (folder / "core.yaml").write_text(json.dumps({"icl_tasks": tasks}))  # JSON is YAML
    rows = [f"{label},{baseline}" for label, *_, baseline in entries]
    (folder / "eval_meta_data.csv").write_text("\n".join(["Eval Task,Random baseline", *rows]) + "\n")
    return folder


@pytest.fixture
def bundle(tmp_path):
    return write_bundle(tmp_path / "bundle")


@pytest.fixture
def make_bundle(tmp_path):
    """Makes another bundle: ``make_bundle({"choose": [...]})``."""
    return lambda examples=None, entries=ENTRIES: write_bundle(tmp_path / "other", examples, entries)


@pytest.fixture
def byte_tokenizer():
    return ByteTokenizer()


@pytest.fixture
def table_model():
    return TableModel()
