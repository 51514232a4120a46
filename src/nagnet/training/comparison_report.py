"""Figures and report of a finished comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nagnet.data.loader import BatchLoader, PackedTokens, encode_documents
from nagnet.diagnostics import figures
from nagnet.diagnostics.confidence import collect_confidence
from nagnet.diagnostics.geometry import gain_by_update, norm_by_depth, rotation_by_depth
from nagnet.diagnostics.report import write_report
from nagnet.diagnostics.style import save_figure
from nagnet.training.comparison import Comparison

PROBE_DOCUMENTS = 24
PROBE_LENGTH = 64
CONFIDENCE_ROWS = 48


def probe_tokens(packed: PackedTokens, documents: int = PROBE_DOCUMENTS, length: int = PROBE_LENGTH) -> Tensor:
    """The first documents that are long enough, BOS in front, cut to ``length`` tokens.

    Where no document is that long, the length of the longest takes its place.

    Returns:
        int64 [at most ``documents``, at most ``length``].
    """
    length = min(length, int((packed.offsets[1:] - packed.offsets[:-1]).max()))
    starts = [int(a) for a, b in zip(packed.offsets[:-1], packed.offsets[1:], strict=True) if b - a >= length]
    return torch.stack(
        [torch.from_numpy(packed.tokens[start : start + length].astype("int64")) for start in starts[:documents]]
    )


def write_comparison_report(comparison: Comparison, summary: dict[str, Any]) -> Path:
    """Measures the trained arms on held-out text, draws the figures and writes report.html.

    Returns:
        Path of the report; figures lie beside it in ``figures/`` as PNG and SVG.
    """
    packed = encode_documents(comparison.corpus.held_out, comparison.tokenizer)
    tokens = probe_tokens(packed).to(comparison.device)
    config = comparison.config
    rows = BatchLoader(packed, 1, min(config.seq_len, len(packed.tokens) - 1), seed=0)
    n_batches = min(CONFIDENCE_ROWS, rows.rows_per_epoch)
    batches = [rows.batch(step) for step in range(n_batches)]
    batches = [(inputs.to(comparison.device), targets.to(comparison.device)) for inputs, targets in batches]
    models = {name: trainer.model for name, trainer in comparison.trainers.items()}
    norms = {name: norm_by_depth(model, tokens) for name, model in models.items()}
    rotations = {name: rotation_by_depth(model, tokens) for name, model in models.items()}
    gains = {name: gain_by_update(model, tokens) for name, model in models.items()}
    confidence = {name: collect_confidence(model, batches) for name, model in models.items()}
    metrics = read_metrics(comparison.out / "metrics.jsonl")
    drawn = [
        ("loss", "Training loss", figures.loss_figure(metrics), figures.LOSS_CAPTION),
        ("norm_by_depth", "Stream norm by depth", figures.norm_figure(norms), figures.NORM_CAPTION),
        ("rotation", "Cumulative rotation", figures.rotation_figure(rotations), figures.ROTATION_CAPTION),
        ("confidence", "Confidence", figures.confidence_figure(confidence), figures.CONFIDENCE_CAPTION),
    ]
    if any(gain is not None for gain in gains.values()):
        drawn.insert(3, ("gain", "Gain by update", figures.gain_figure(gains), figures.GAIN_CAPTION))
    shown = []
    for name, title, fig, caption in drawn:
        paths = {path.suffix: path for path in save_figure(fig, comparison.out / "figures", name)}
        shown.append((title, caption, paths[".svg"].read_bytes()))
    path = comparison.out / "report.html"
    write_report(path, f"{comparison.recipe}: {' against '.join(models)}", summary, shown)
    return path


def read_metrics(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows of a metrics.jsonl by arm."""
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        by_arm.setdefault(row["arm"], []).append(row)
    return by_arm
