"""Show what skipping sublayers costs a trained model: bits per byte against executed FLOPs.

Tokens skip the sublayers in which their rotation score is lowest. Beside it the same share is skipped by other rules:
at random, by whole sublayers of lowest mean gain or mean score. Only if the score is better than those does it know
which tokens need a sublayer. Any norm-agnostic model will do, trained with skipping or not; it is not changed.

Writes depth_curve.json, depth_curve.csv, depth_curve.png and depth_curve.svg.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import tyro

from nagnet.cli.device import DeviceName, resolve_device
from nagnet.cli.output_folder import check_inputs_outside, check_output_folder, claim_output_folder


@dataclass
class Options:
    """Which model, how far, on what text."""

    checkpoint: tyro.conf.Positional[Path]
    """Model folder, checkpoint, or folder of a training run."""
    rates: tuple[float, ...] = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
    """Shares of the sublayer-tokens to skip."""
    no_controls: bool = False
    """Leave the other rules out."""
    data: str | None = None
    """Text: a file, a folder or a Hugging Face data set; default: the held-out text of the model's run."""
    max_bytes: int | None = 200_000
    """Most bytes of it to score, in whole documents."""
    seq_len: int | None = None
    """Most tokens at a time; default: the run's."""
    batch_size: int = 16
    """Windows of text at a time."""
    tokenizer: Path | None = None
    """The model's tokenizer.json, where it is not found beside the model."""
    out: Path | None = None
    """Folder to write; default: runs/depth-curve-DATE."""
    force: bool = False
    """Delete an earlier result in the output folder first."""
    device: DeviceName = "auto"
    """Where to compute."""
    json: bool = False
    """Print JSON instead of a table."""


def main(options: Options) -> None:
    """Measures, writes and prints."""
    from nagnet.data.corpus import hash_documents
    from nagnet.diagnostics.skipping import CONTROLS, depth_curve, draw_depth_curve
    from nagnet.files import write_atomically
    from nagnet.training.evaluated import open_model
    from nagnet.training.progress import Progress

    out = options.out or Path("runs") / f"depth-curve-{datetime.now():%Y%m%d-%H%M%S}"
    read = (options.checkpoint, options.data, options.tokenizer)
    check_inputs_outside(out, [Path(path) for path in read if path])
    check_output_folder(out, options.force)
    opened = open_model(
        options.checkpoint, resolve_device(options.device), tokenizer_file=options.tokenizer, seq_len=options.seq_len
    )
    documents, source = opened.text(options.data, options.max_bytes)
    with Progress("depth curve", 1.0, quiet=options.json) as progress:
        points = depth_curve(
            opened.model,
            lambda score: opened.score(documents, score, options.batch_size),
            opened.seq_len,
            options.rates,
            () if options.no_controls else tuple(CONTROLS),
            progress=lambda done, of: progress.update(done / of),
        )
    rows = [point.to_dict() for point in points]
    record = {
        "model": str(opened.saved.folder),
        "model_hash": opened.saved.content_hash(),
        "text": source,
        "text_hash": hash_documents(documents),
        "seq_len": opened.seq_len,
        "points": rows,
    }
    claim_output_folder(out, options.force)
    write_atomically(out / "depth_curve.json", (json.dumps(record, indent=2) + "\n").encode())
    write_atomically(out / "depth_curve.csv", _csv(rows).encode())
    draw_depth_curve(points, out)
    if options.json:
        print(json.dumps(record, indent=2))
        return
    _print(rows)
    print(f"in {out}: depth_curve.json, depth_curve.csv, depth_curve.png, depth_curve.svg")


def _csv(rows: list[dict[str, Any]]) -> str:
    names = [name for name in rows[0] if name != "run_rates"]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from nagnet.cli.comparison_table import PIPED_WIDTH

    table = Table()
    table.add_column("skipped by", no_wrap=True)
    columns = ("threshold", "sublayer-tokens", "parameters", "FLOPs", "bits per byte", "above full depth")
    for column in columns:
        table.add_column(column, justify="right")
    full = rows[0]["bits_per_byte"]
    for row in rows:
        shares = (f"{row[name]:.1%}" for name in ("sublayer_tokens", "parameters", "flops"))
        threshold = f"{row['threshold']:.4f}" if row["rule"] == "rotation score" else ""
        bits = row["bits_per_byte"]
        table.add_row(row["rule"], threshold, *shares, f"{bits:.4f}", f"{bits - full:+.4f}")
    Console(width=None if sys.stdout.isatty() else PIPED_WIDTH).print(table)
