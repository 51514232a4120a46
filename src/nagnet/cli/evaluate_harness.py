"""What nagnet evaluate harness does."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from nagnet.cli.comparison_table import PIPED_WIDTH
from nagnet.cli.output_folder import check_output_folder, claim_output_folder
from nagnet.errors import UserError
from nagnet.files import write_atomically

if TYPE_CHECKING:
    from nagnet.cli.evaluate import Harness

RESULT_FILE = "harness.json"
KEPT = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better", "configs")


def evaluate_harness(options: Harness, device: torch.device) -> None:
    """Lets lm-eval ask the model, writes and prints the result."""
    try:
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.utils import handle_non_serializable
    except ImportError as error:
        raise UserError(
            "evaluate harness needs lm-eval, which is not installed: pip install 'nagnet[harness]'"
        ) from error
    from nagnet.evaluation.harness import NagnetLM

    _check(options)
    manager = _tasks(options)
    model = NagnetLM(
        options.checkpoint,
        options.tokenizer,
        options.batch_size,
        device=str(device),
        max_length=options.max_length,
        compile=options.compile,
    )
    found: Any = simple_evaluate(
        model=model,
        tasks=list(options.tasks),
        task_manager=manager,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        log_samples=False,
    )
    record = {"model": str(options.checkpoint)} | {name: found[name] for name in KEPT if name in found}
    text = json.dumps(record, indent=2, default=handle_non_serializable)
    if options.out is not None:
        claim_output_folder(options.out, options.force)
        write_atomically(options.out / RESULT_FILE, f"{text}\n".encode())
    if options.json:
        print(text)
    else:
        _print(record)


def _check(options: Harness) -> None:
    if options.include_path is not None and not options.include_path.is_dir():
        raise UserError(f"{options.include_path} is no folder; name one with task files (YAML)")
    if options.limit is not None and options.limit < 1:
        raise UserError(f"--limit is {options.limit}; give 1 or more examples")
    if options.out is not None:
        check_output_folder(options.out, options.force)


def _tasks(options: Harness) -> Any:
    """lm-eval's index of tasks. Those asked for are read once: what is wrong with them is told before a model loads."""
    from lm_eval.tasks import TaskManager

    manager = None
    if options.include_path is not None:  # without lm-eval's own, whose index takes seconds, where these are enough
        manager = TaskManager(include_path=options.include_path, include_defaults=False)
    if manager is None or _unknown(manager, options):
        manager = TaskManager(include_path=options.include_path)
    if unknown := _unknown(manager, options):
        where = options.include_path or "a folder given with --include-path"
        raise UserError(f"unknown task {', '.join(unknown)}; lm-eval has none of this name, nor has {where}")
    try:
        manager.load(list(options.tasks))
    except Exception as error:  # whatever reading a task and its data raises
        reason = " ".join(f"{type(error).__name__} {error}".split())
        raise UserError(f"lm-eval cannot load {', '.join(options.tasks)}: {reason}") from error
    return manager


def _unknown(manager: Any, options: Harness) -> list[str]:
    return [name for name in options.tasks if not manager.match_tasks([name])]


def _print(record: dict[str, Any]) -> None:
    """A line for each metric of each task. lm-eval names them ``metric,filter``."""
    table = Table()
    for column in ("task", "shots", "examples", "metric", "value", "standard error"):
        table.add_column(column, justify="left" if column in ("task", "metric") else "right", no_wrap=True)
    for task, row in record["results"].items():
        count = record.get("n-samples", {}).get(task, {}).get("effective", "")
        for name, value in row.items():
            metric, _, which = name.partition(",")
            if not isinstance(value, int | float) or not which or metric.endswith("_stderr"):
                continue
            error = row.get(f"{metric}_stderr,{which}")
            shown = f"{error:.4f}" if isinstance(error, int | float) else ""
            label = metric if which == "none" else f"{metric} ({which})"
            table.add_row(task, str(record.get("n-shot", {}).get(task, "")), str(count), label, f"{value:.4f}", shown)
    Console(width=None if sys.stdout.isatty() else PIPED_WIDTH).print(table)
