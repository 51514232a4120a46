"""Look inside one or several models: every figure of the stream, the numbers behind them, and one report.

nagnet probe runs/demo/norm_agnostic runs/demo/pre_norm --out probe

A checkpoint is a model folder, a checkpoint, or the folder of a training run, and may have a name: NAME=CHECKPOINT.
Several are drawn side by side. Writes report.html (open it in a browser; it needs no network), figures/*.png and .svg,
numbers/*.json and .csv. docs/probe.md says what each figure shows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import tyro

from nagnet.cli.device import DeviceName, resolve_device
from nagnet.cli.output_folder import check_inputs_outside, check_output_folder, claim_output_folder


@dataclass
class Options:
    """Which models, on what text."""

    checkpoints: tyro.conf.Positional[tuple[str, ...]]
    """Model folders, checkpoints, or folders of training runs, each as CHECKPOINT or NAME=CHECKPOINT."""
    out: Path | None = None
    """Folder to write; default: runs/probe-DATE."""
    data: str | None = None
    """Text: a file, a folder or a prepared folder, of which the held-out part is read; default: that of the first
    model's run."""
    whole: bool = False
    """Read all of --data, text that no model was trained on."""
    max_bytes: int = 2_000_000
    """Most bytes of it to read, in whole documents."""
    text: Path | None = None
    """A file to show token by token; default: the beginning of the first held-out document."""
    seq_len: int | None = None
    """Most tokens at a time where predictions are judged; default: the run's."""
    skip_threshold: float | None = None
    """Tokens skip sublayers whose rotation score is not above this, 0 to 1; default: as each model was trained."""
    tokenizer: Path | None = None
    """The models' tokenizer.json, where it is not found beside a model."""
    force: bool = False
    """Delete an earlier result in the output folder first."""
    device: DeviceName = "auto"
    """Where to compute."""
    json: bool = False
    """Print the numbers as JSON and nothing else."""


def main(options: Options) -> None:
    """Measures, draws, writes."""
    from nagnet.diagnostics.gallery import measure
    from nagnet.diagnostics.probe_report import REPORT_FILE, write_probe
    from nagnet.training.probing import open_probe
    from nagnet.training.progress import Progress

    out = options.out or Path("runs") / f"probe-{datetime.now():%Y%m%d-%H%M%S}"
    words = [path for word in options.checkpoints for path in (word, word.partition("=")[2])]
    read = (*words, options.data, options.text, options.tokenizer)
    check_inputs_outside(out, [Path(path) for path in read if path])
    check_output_folder(out, options.force)
    models, page = open_probe(
        options.checkpoints,
        resolve_device(options.device),
        data=options.data,
        max_bytes=options.max_bytes,
        whole=options.whole,
        text_file=options.text,
        tokenizer_file=options.tokenizer,
        seq_len=options.seq_len,
        skip_threshold=options.skip_threshold,
    )
    with Progress("measuring", 1.0, quiet=options.json) as progress:
        measured = list(measure(models, lambda done, of: progress.update(done / of)))
    claim_output_folder(out, options.force)
    with Progress("drawing", 1.0, quiet=options.json) as progress:
        numbers = write_probe(out, measured, page, lambda done, of: progress.update(done / of))
    print(json.dumps(numbers) if options.json else f"report: {out / REPORT_FILE}")
