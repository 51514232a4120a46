"""Train arms that differ in residual rule and readout, on the same batches and FLOPs, and report the difference.

Writes to a new folder: report.html, summary.json, metrics.jsonl, tokenizer.json, figures/, and each arm's model.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import tyro

from nagnet.cli.device import DeviceName, resolve_device
from nagnet.cli.names import unknown_name
from nagnet.cli.output_folder import check_output_folder, claim_output_folder


@dataclass
class CommonOptions:
    """Options that demo and compare share."""

    data: Path | None = None
    """A file or folder of text; default: Python's standard library."""
    out: Path | None = None
    """New folder for the results; default: runs/RECIPE-DATE-TIME."""
    seed: int = 0
    """Seed of initial parameters, batch order and samples."""
    budget: float | None = None
    """Training FLOPs of each arm, such as 1e12; default: the recipe's."""
    device: DeviceName = "auto"
    """Where to compute."""
    eager: bool = False
    """Do not compile: starts sooner, trains slower."""
    force: bool = False
    """Delete an earlier run in the output folder first."""
    json: bool = False
    """Print summary.json on standard output instead of the table."""


@dataclass
class Options(CommonOptions):
    """What to compare."""

    recipe: Annotated[str, tyro.conf.Positional] = "stdlib-tiny"
    """Name of a recipe; see nagnet recipes."""
    arms: str = "norm_agnostic,pre_norm"
    """Residual rules, separated by commas; differences are first minus each other."""


def main(options: Options) -> int:
    """Runs the comparison."""
    return run(options, options.recipe, [name.strip() for name in options.arms.split(",") if name.strip()])


def run(options: CommonOptions, recipe: str, arm_names: list[str]) -> int:
    """Trains, evaluates and reports.

    Returns:
        Exit code: 0, or 130 where Ctrl-C ended training early.
    """
    from nagnet.data.corpus import read_corpus, standard_library_corpus
    from nagnet.nn.residual import RESIDUAL_STREAMS
    from nagnet.recipes import RECIPES
    from nagnet.training.comparison import Comparison, build_arms
    from nagnet.training.compute import choose_compute_dtype

    out = options.out or Path("runs") / f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}"
    check_output_folder(out, options.force)
    if recipe not in RECIPES:
        raise unknown_name("recipe", recipe, RECIPES)
    for name in arm_names:
        if name not in RESIDUAL_STREAMS:
            raise unknown_name("arm", name, RESIDUAL_STREAMS)
    changes: dict[str, Any] = {"seed": options.seed, "compile": not options.eager}
    if options.budget is not None:
        changes["flops"] = options.budget
    config = dataclasses.replace(RECIPES[recipe](), **changes)
    arms = build_arms(config.model, arm_names)
    device = resolve_device(options.device)
    corpus = read_corpus(options.data) if options.data else standard_library_corpus()
    comparison = Comparison(
        recipe,
        config,
        arms,
        corpus,
        out,
        device,
        dtype=choose_compute_dtype(device),
        echo=_quiet if options.json else _say,
    )
    claim_output_folder(out, options.force)
    comparison.describe()
    comparison.train()
    comparison.write_summary(comparison.summary({}))  # so that nothing is lost if what follows is cut short
    try:
        if comparison.interrupted:
            raise KeyboardInterrupt
        summary = comparison.summary(comparison.evaluate())
        comparison.write_summary(summary)
        _finish(comparison, summary, options.json)
    except KeyboardInterrupt:
        done = ", ".join(f"{name} {t.n_done} of {t.n_steps} steps" for name, t in comparison.trainers.items())
        where = f"models, tokenizer, metrics and summary.json are in {out}, without a report"
        print(f"nagnet: interrupted after {done}; {where}", file=sys.stderr)
        return 130
    return 0


def _finish(comparison: Any, summary: dict[str, Any], as_json: bool) -> None:
    from nagnet.cli.comparison_table import print_table
    from nagnet.training.comparison_report import write_comparison_report

    report = write_comparison_report(comparison, summary)
    if as_json:
        print(json.dumps(summary, indent=2))
    else:
        print_table(summary)
        print(f"report: {report}")


def _say(line: str) -> None:
    print(line, flush=True)


def _quiet(line: str) -> None:
    """With --json, standard output holds the JSON alone."""
