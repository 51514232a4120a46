"""The card of an exported model: what it is, what made it, what was measured, and how to read its confidence."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import PurePath
from typing import Any

from nagnet.evaluation.saved_model import SavedModel
from nagnet.models.config import ModelConfig
from nagnet.models.flops import parameter_counts

CARD_FILE = "README.md"

_FRONT_MATTER = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- nagnet
- {residual}
---
"""
_RESULTS = {  # names in what a run leaves behind, and how they are shown
    "bits_per_byte": ("bits per byte of held-out text", ".4f"),
    "tokens": ("training tokens", ",d"),
    "flops": ("training FLOPs", ".3e"),
    "steps": ("optimizer steps", ",d"),
}
_TRAINING = ("seed", "batch_size", "seq_len", "dtype", "convention")

_LOADING = """\
```python
from transformers import {classes}

folder = "."  # this folder
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
{more}```

The code that runs is in this folder, generated from the sources of nagnet {version} (MIT license); it needs torch and
transformers, and not nagnet. It is trained further like any model of transformers: after each step of an optimizer the
parameters are brought back to where the residual rule wants them.
"""
_WITH_TOKENIZER = """\
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer("def main(", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0], skip_special_tokens=True))
confidence = model(**inputs).confidence  # [1, T]
"""
_WITHOUT_TOKENIZER = """\
confidence = model(input_ids).confidence  # input_ids: int64 [B, T]
"""

_CONFIDENCE = """\
`model(...).confidence` is $e^{s_N}$ of every token, the norm of the residual stream at its end. The logits are cosines
times $e^{s_N}$, so it is the inverse temperature of the next token's distribution: the larger, the more the
distribution is concentrated. It is no probability of being right: compare it between tokens of one model, not between
models.
"""
_NO_CONFIDENCE = """\
`model(...).confidence` is $e^{s_N}$ of every token, the RMS of the residual stream at its end. This model's readout
does not use it, so it says nothing about temperature; take the entropy of the distribution instead.
"""
_LEARNED = """\
`model(...).confidence` is $e^{s_N}$ of every token, the norm of the residual stream at its end. It multiplies the
token's logits, beside whatever else the readout does to them (see `readout` below): the larger, the more the next
token's distribution is concentrated. Compare it between tokens of this model alone.
"""


def model_card(config: ModelConfig, saved: SavedModel, has_tokenizer: bool) -> str:
    """Text of the card in Markdown.

    Args:
        config: of the model. saved: with the run's config and results, where they are known.
        has_tokenizer: whether the tokenizer is in the folder.
    """
    what = "norm-agnostic" if config.residual == "norm_agnostic" else config.residual.replace("_", "-")
    parameters = parameter_counts(config)["total"]
    classes = "AutoModelForCausalLM, AutoTokenizer" if has_tokenizer else "AutoModelForCausalLM"
    more = _WITH_TOKENIZER if has_tokenizer else _WITHOUT_TOKENIZER
    sections = [
        _FRONT_MATTER.format(residual=config.residual.replace("_", "-")),
        f"# A {what} decoder of {config.n_layers} blocks x {config.d_model}\n",
        f"{parameters:,} parameters, vocabulary {config.vocab_size:,}, context {config.max_seq_len:,} tokens. A "
        "language model as it comes from training on text: nothing made it helpful or harmless.\n",
        _LOADING.format(classes=classes, more=more, version=version("nagnet")),
        "" if has_tokenizer else "Its tokenizer was not at hand when it was exported, and is not here.\n",
        "## Confidence\n",
        _confidence(config),
        "## Training\n",
        _training(saved.run_config),
        _table("results", _results(saved.results)),
        "## Config\n",
        _table("field", {name: f"`{value}`" for name, value in config.to_dict().items()}),
        f"SHA-256 of the weights as nagnet stored them: `{saved.content_hash()}`\n",
    ]
    return "\n".join(section for section in sections if section)


def _confidence(config: ModelConfig) -> str:
    if not config.readout.uses_log_norm:
        return _NO_CONFIDENCE
    return _CONFIDENCE if config.readout.scale == "log_norm" and config.readout.rows == "unit" else _LEARNED


def _training(run: dict[str, Any] | None) -> str:
    """Data and settings, where the run's config is known. Of a path its last part is told alone."""
    if run is None:
        return "Data and settings are not known: the model was saved without the config of its run.\n"
    data = run.get("data")
    name = "Python's standard library" if data is None else data if data.startswith("hf:") else PurePath(data).name
    facts = {"data": name} | {key: run[key] for key in _TRAINING if run.get(key) is not None}
    return _table("setting", {key: f"`{value}`" for key, value in facts.items()})


def _results(results: dict[str, Any]) -> dict[str, str]:
    shown = {}
    for key, (label, form) in _RESULTS.items():
        value = results.get(key)
        if isinstance(value, int | float) and value == value:
            shown[label] = format(value, form)
    evaluated = results.get("evaluated")
    if isinstance(evaluated, dict) and "documents" in evaluated:
        shown["held-out text"] = f"{evaluated['documents']:,} documents, {evaluated['bytes']:,} bytes"
    return shown


def _table(name: str, rows: dict[str, str]) -> str:
    if not rows:
        return ""
    return "\n".join([f"| {name} | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items()), ""])
