"""Train a recipe, with checkpoints, metrics and a watch on the gates.

Any field of the recipe can be changed by KEY=VALUE: nagnet train stdlib-tiny model.residual=pre_norm
optimizer.matrix_lr=0.01 tokens=2000000. After a stop the same command with --resume goes on, exactly. Several
processes: torchrun --nproc-per-node N -m nagnet train ...

Writes to a new folder: run.json, metrics.jsonl, tensorboard/, checkpoints/, and at the end model/ and summary.json.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import tyro

from nagnet.cli.device import DeviceName, resolve_device
from nagnet.cli.names import unknown_name
from nagnet.cli.output_folder import check_output_folder, claim_output_folder
from nagnet.errors import UserError


@dataclass
class Options:
    """What to train."""

    recipe: Annotated[str, tyro.conf.Positional] = "stdlib-tiny"
    """Name of a recipe; see nagnet recipes."""
    changes: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Fields of the recipe to change, as KEY=VALUE; dots lead into nested ones."""
    data: str | None = None
    """A prepared folder (nagnet data prepare), or a file or folder of text; default: the recipe's."""
    out: Path | None = None
    """New folder for the run; default: runs/RECIPE-DATE-TIME."""
    resume: bool = False
    """Go on from the last checkpoint in --out; start there if it has none."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Beside metrics.jsonl: tensorboard, wandb, or none."""
    peak_flops: float | None = None
    """Peak FLOP/s of one device, for MFU where it is not known."""
    dollars_per_hour: float | None = None
    """Price of all devices together, to show what is left to pay."""
    timeout: float = 600.0
    """Seconds that a process waits for another before it gives the run up."""
    device: DeviceName = "auto"
    """Where to compute."""
    force: bool = False
    """Delete an earlier run in the output folder first."""
    json: bool = False
    """Print summary.json on standard output and nothing else there."""


def main(options: Options) -> int:
    """Trains, or goes on training.

    Returns:
        Exit code: 0, or 128 + the signal that stopped the run.
    """
    from nagnet.training.distributed import join_world, on_main
    from nagnet.training.metrics import check_trackers

    config = recipe_config(options.recipe, options.changes, options.data)
    trackers = () if options.trackers == ("none",) else options.trackers
    check_trackers(trackers)
    if options.resume and options.out is None:
        raise UserError("--resume needs --out, the folder of the run to go on with")
    with join_world(resolve_device(options.device), options.timeout) as (world, device):
        out = options.out or Path("runs") / on_main(world, lambda: f"{options.recipe}-{datetime.now():%Y%m%d-%H%M%S}")
        run = open_run(options, config, out, world, device, trackers)
        summary = run.train()
        run.report(summary)
        if options.json and world.is_main:
            print(json.dumps(summary, indent=2))
    return 0 if run.stopped_by is None else 128 + run.stopped_by


def recipe_config(recipe: str, changes: tuple[str, ...], data: str | None) -> Any:
    """The recipe with the user's changes."""
    from nagnet.recipes import RECIPES
    from nagnet.training.overrides import override

    if recipe not in RECIPES:
        raise unknown_name("recipe", recipe, RECIPES)
    config = override(RECIPES[recipe](), changes)
    return config if data is None else config.replace(data=data)


def open_run(options: Options, config: Any, out: Path, world: Any, device: Any, trackers: tuple[str, ...]) -> Any:
    """The run, in a folder that is its own, with its last checkpoint loaded where it is resumed."""
    from nagnet.training.compute import resolve_dtype
    from nagnet.training.distributed import on_main
    from nagnet.training.run import Run
    from nagnet.training.text import open_text

    if not options.resume:
        on_main(world, lambda: check_output_folder(out, options.force))
    read_text = functools.partial(open_text, config.data, config.model.vocab_size, config.eval_bytes)
    on_main(world, lambda: read_text() and None)  # one process fills the cache that the others read
    run = Run(
        options.recipe,
        config,
        read_text(),
        out,
        device,
        on_main(world, lambda: resolve_dtype(config.dtype, device)),
        world,
        trackers,
        _quiet if options.json or not world.is_main else _say,
        options.peak_flops,
        options.dollars_per_hour,
    )
    resumed = options.resume and run.resume()
    if not resumed:  # what a run left before its first checkpoint is not worth keeping
        on_main(world, lambda: claim_output_folder(out, options.force or options.resume) and None)
    run.describe()
    return run


def _say(line: str) -> None:
    print(line, flush=True)


def _quiet(line: str) -> None:
    """With --json, standard output holds the JSON alone; other processes print nothing."""
