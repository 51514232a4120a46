"""What nagnet evaluate core does."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from nagnet import ops
from nagnet.cli.comparison_table import PIPED_WIDTH
from nagnet.cli.output_folder import check_output_folder, claim_output_folder
from nagnet.errors import UserError
from nagnet.evaluation import core
from nagnet.evaluation.core_journal import AnswerFile
from nagnet.evaluation.core_tasks import Bundle, read_bundle
from nagnet.evaluation.frozen_scale import frozen_scale
from nagnet.files import write_atomically
from nagnet.training.evaluated import EvaluatedModel, open_model
from nagnet.training.progress import Progress

if TYPE_CHECKING:
    from nagnet.cli.evaluate import Core

ANSWERS_FILE = "answers.jsonl"
RESULT_FILE = "core.json"
COMPILED_FROM = 4e9  # tokens x blocks x width: compiled blocks save twice what compiling takes (docs/evaluation.md)
CHARACTERS_PER_TOKEN = 4
COLUMNS = ("task", "kind", "shots", "examples", "accuracy", "guessing", "centred")


def evaluate_core(options: Core, device: torch.device) -> None:
    """Answers what is not answered yet, writes and prints the result."""
    out = options.out or Path("runs") / f"core-{datetime.now():%Y%m%d-%H%M%S}"
    goes_on = options.resume and (out / ANSWERS_FILE).exists()
    _check(options, out, goes_on)
    bundle = read_bundle(options.bundle, options.max_per_task)
    opened = open_model(
        options.checkpoint,
        device,
        tokenizer_file=options.tokenizer,
        freezable=options.freeze_scale,
        skip_threshold=options.skip_threshold,
    )
    compiled = _is_compiled(options, opened, bundle, device)
    log_norm = _mean_log_norm(opened, options) if options.freeze_scale else None
    identity = {
        "weights": opened.saved.content_hash(),
        "tokenizer": opened.tokenizer.content_hash,
        "bundle": bundle.content_hash,
        "max_per_task": options.max_per_task,
        "max_tokens": options.max_tokens or opened.model.config.max_seq_len,
        "frozen_log_norm": log_norm,
        "skip_threshold": options.skip_threshold,
        "compiled": compiled or None,  # it rounds otherwise; None goes on with what older versions began
    }
    if not goes_on:
        claim_output_folder(out, options.force)
    journal = AnswerFile(out / ANSWERS_FILE, identity)
    result = _answer(options, opened, bundle, journal, log_norm, compiled, out)
    record = {"model": str(opened.saved.folder), "bundle_folder": str(options.bundle), **identity, "result": result}
    write_atomically(out / RESULT_FILE, (json.dumps(record, indent=2) + "\n").encode())
    if options.json:
        print(json.dumps(record, indent=2))
        return
    _print(bundle, result)
    print(f"in {out}: {RESULT_FILE}, {ANSWERS_FILE}")


def _check(options: Core, out: Path, goes_on: bool) -> None:
    """Refuses early what would be refused late."""
    if options.resume and options.out is None:
        raise UserError("--resume needs --out, the folder of the evaluation to go on with")
    if options.data is not None and not options.freeze_scale:
        raise UserError("--data is the text of --freeze-scale; give both or neither")
    for name in ("max_tokens", "batch_tokens"):
        value = getattr(options, name)
        if value is not None and value < 2:
            raise UserError(f"--{name.replace('_', '-')} {value}: give 2 or more")
    if not goes_on:
        check_output_folder(out, options.force)


def _mean_log_norm(opened: EvaluatedModel, options: Core) -> float:
    documents, _ = opened.text(options.data, None)
    with Progress("measuring the scale", 1.0) as progress:
        mean = opened.mean_log_norm(documents, progress=lambda done, of: progress.update(done / of))
    return round(mean, 4)  # so that a resumed evaluation has the same one, whatever rounds otherwise


def _is_compiled(options: Core, opened: EvaluatedModel, bundle: Bundle, device: torch.device) -> bool:
    """Whether blocks are compiled: the same for the same bundle, model and options, as answers may differ by it."""
    if options.compile == "auto":
        config = opened.model.config
        n_tokens = sum(task.n_characters() for task in bundle.tasks) / CHARACTERS_PER_TOKEN
        pays = n_tokens * config.n_layers * config.d_model >= COMPILED_FROM
        wanted = pays and device.type == "cpu" and opened.model.skipping is None
    else:
        wanted = options.compile == "always"
    return wanted and ops.compiler_works()


def _answer(
    options: Core,
    opened: EvaluatedModel,
    bundle: Bundle,
    journal: AnswerFile,
    log_norm: float | None,
    compiled: bool,
    out: Path,
) -> dict[str, Any]:
    n_examples = sum(len(task.examples) for task in bundle.tasks)
    if len(journal) and not options.json:
        print(f"{len(journal):,} of {n_examples:,} answers are there already")
    frozen = nullcontext() if log_norm is None else frozen_scale(opened.model, log_norm)
    try:
        with Progress("CORE", n_examples) as progress, frozen:
            return core.evaluate_core(
                opened.model.eval(),
                opened.tokenizer,
                bundle,
                max_tokens=options.max_tokens,
                batch_tokens=options.batch_tokens,
                compiled=compiled,
                progress=lambda done, of, label: progress.update(done, f"{label}, {done:,} of {of:,} examples"),
                journal=journal,
            )
    except KeyboardInterrupt:
        where = f"{len(journal):,} of {n_examples:,} answers are in {out}"
        print(f"{where}; the same command with --resume --out {out} goes on", file=sys.stderr)
        raise


def _print(bundle: Bundle, result: dict[str, Any]) -> None:
    table = Table()
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("task", "kind") else "right", no_wrap=True)
    for task in bundle.tasks:
        row = result[task.label]
        table.add_row(
            task.label,
            task.kind.replace("_", " "),
            str(task.n_shots),
            f"{row['n']:,}",
            f"{row['accuracy']:.4f}",
            f"{task.baseline / 100:.4f}",
            f"{row['centered']:+.4f}",
        )
    Console(width=None if sys.stdout.isatty() else PIPED_WIDTH).print(table)
    print(f"CORE {result['core_metric']:.4f}, the mean of {len(bundle.tasks)} centred accuracies")
