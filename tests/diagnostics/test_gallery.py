"""The exhibits of a probe as a whole: memory, and numbers as plain values."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from nagnet.diagnostics import gallery
from nagnet.diagnostics.geometry import RotationByDepth

DEEP = """
import resource
import torch
from nagnet import Decoder, ModelConfig
from nagnet.diagnostics import gallery
from nagnet.diagnostics.probed import ProbedModel, ProbeText

torch.set_num_threads(1)
config = ModelConfig(residual="{rule}", d_model=64, n_layers=64, n_heads=2, vocab_size=32768, max_seq_len=2048)
model = Decoder(config, seed=0)
generator = torch.Generator().manual_seed(0)
tokens = torch.randint(32768, (128, 64), generator=generator)
row = torch.randint(32768, (1, 2049), generator=generator)
text = ProbeText(tokens[:24], tokens, [(row[:, :-1], row[:, 1:])], torch.ones(32768, dtype=torch.long))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
for exhibit in gallery.EXHIBITS:
    if exhibit.name != "block_removal":  # 64 more passes of the same size
        exhibit.measure(ProbedModel(model, text))
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["norm_agnostic", "pre_norm"])
def test_memory_stays_flat_for_64_blocks(rule):
    run = subprocess.run([sys.executable, "-c", DEEP.format(rule=rule)], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 0.4e9  # at width 640 ten times the vectors: 1 GB, of which the logits need no more


def test_numbers_become_json_and_rows():
    found = {
        "a": RotationByDepth(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("inf")])),
        "b": None,
    }
    plain = gallery.plain(found)
    assert json.loads(json.dumps(plain, allow_nan=False)) == {
        "a": {"angle": [1.0, None], "cumulative": [1.0, None]},
        "b": None,
    }
    assert list(gallery.long_rows({"a": found["a"]}))[:2] == [
        ["a", "angle", 0, "", "", 1.0],
        ["a", "angle", 1, "", "", None],
    ]
    assert gallery.plain({"x": np.array([True, False])}) == {"x": [True, False]}


def test_rows_of_metrics_become_rows_of_a_table():
    found = {"run": [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}]}
    assert list(gallery.long_rows(found)) == [
        ["run", "step", 0, "", "", 1],
        ["run", "loss", 0, "", "", 2.0],
        ["run", "step", 1, "", "", 2],
        ["run", "loss", 1, "", "", 1.5],
    ]


def test_a_quantity_inside_another_has_both_names():
    found = {"run": [{"step": 5, "health": {"norm": [1.0, 2.0], "name": "a text"}}]}
    assert list(gallery.long_rows(found)) == [
        ["run", "step", 0, "", "", 5],
        ["run", "health.norm", 0, 0, "", 1.0],
        ["run", "health.norm", 0, 1, "", 2.0],
    ]
