"""A few tiny experiments before a big run.

First steps of the recipe's model at its true shape, on random tokens: memory, speed, and what the whole run would take.
Then a scaled-down run with the recipe's depth, rule, rates and schedule on real text: does the loss fall, do the gates
stay open? Exit code 1 if a gate collapses or something is not finite.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from nagnet.cli.device import DeviceName, resolve_device
from nagnet.cli.output_folder import claim_output_folder

EXIT_UNHEALTHY = 1


@dataclass
class Options:
    """What to try."""

    recipe: Annotated[str, tyro.conf.Positional] = "stdlib-tiny"
    """Name of a recipe; see nagnet recipes."""
    changes: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Fields of the recipe to change, as KEY=VALUE; dots lead into nested ones."""
    steps: int = 3
    """Timed steps at true shape, for each of two sizes of a pass; 0 leaves them out."""
    scaled_steps: int = 200
    """Steps of the scaled-down run; 0 leaves it out. A recipe of minutes is run as it is."""
    peak_flops: float | None = None
    """Peak FLOP/s of the device, for MFU where it is not known."""
    dollars_per_hour: float | None = None
    """Price of the device."""
    out: Path | None = None
    """New folder that keeps the scaled-down run; default: none is kept."""
    device: DeviceName = "auto"
    """Where to compute."""
    force: bool = False
    """Delete an earlier run in the output folder first."""
    json: bool = False
    """Print the result as JSON instead of lines."""


def main(options: Options) -> int:
    """Runs both experiments.

    Returns:
        Exit code: 0, or 1 if a gate collapsed or something was not finite.
    """
    from nagnet.cli.train import recipe_config

    config = recipe_config(options.recipe, options.changes, None)
    device = resolve_device(options.device)
    if options.out is not None:
        claim_output_folder(options.out, options.force)
    result: dict[str, Any] = {"recipe": options.recipe, "healthy": True}
    if options.steps > 0:
        result["true_shape"] = _true_shape(options, config, device)
    if options.scaled_steps > 0:
        with tempfile.TemporaryDirectory() as scratch:
            result["scaled_down"] = _scaled_down(options, config, device, options.out or Path(scratch))
    problems = [part["problem"] for part in result.values() if isinstance(part, dict) and part.get("problem")]
    result["healthy"] = not problems
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print("preflight: " + ("; ".join(problems) if problems else "nothing is wrong so far"))
    return EXIT_UNHEALTHY if problems else 0


def _true_shape(options: Options, config: Any, device: Any) -> dict[str, Any]:
    import torch

    from nagnet.training.budget import format_mfu, mfu, resolve_budget
    from nagnet.training.compute import device_name
    from nagnet.training.loop import NonFiniteLoss
    from nagnet.training.preflight import measure_true_shape
    from nagnet.training.progress import format_seconds

    say = _say(options)
    say(f"{options.recipe} at true shape: {resolve_budget(config).describe()}")
    try:
        report = measure_true_shape(config, device, options.steps, options.dollars_per_hour)
    except NonFiniteLoss as error:
        return {"problem": str(error)}
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        return {"problem": f"a pass does not fit ({reason}); lower device_batch_size, or set activation_checkpointing"}
    share = mfu(report.flops_per_second, device_name(device), report.dtype, options.peak_flops)
    measured = "" if report.sequences == report.device_batch else f" (extrapolated from {report.sequences} sequences)"
    say(f"  pass of {report.device_batch} sequences{measured}: peak memory {report.peak_memory_bytes / 2**30:.2f} GiB")
    say(f"  {report.tokens_per_second:,.0f} tokens/s, step {report.step_seconds:,.2f} s, MFU {format_mfu(share)}")
    price = "" if report.dollars is None else f", ${report.dollars:,.2f}"
    say(f"  the whole run on this one device: {format_seconds(report.seconds)}{price}")
    say(f"  loss {report.loss:.3f} nats per token on {report.text}; {_gates(report.health.to_dict())}")
    return dataclasses.asdict(report) | {"health": report.health.to_dict(), "mfu": share}


def _scaled_down(options: Options, config: Any, device: Any, out: Path) -> dict[str, Any]:
    from nagnet.training.loop import NonFiniteLoss
    from nagnet.training.metrics import read_metrics
    from nagnet.training.preflight import run_scaled_down

    say = _say(options)
    say(f"{options.recipe} scaled down:")
    try:
        summary = run_scaled_down(config, options.scaled_steps, device, out, lambda line: say("  " + line))
    except NonFiniteLoss as error:
        problem, _, where = str(error).rpartition("; ")
        return {"problem": f"{problem}; {where if options.out else '--out FOLDER keeps its post-mortem'}"}
    rows = read_metrics(out)
    say(
        f"  {summary['steps']} steps, loss {rows[0]['loss']:.3f} -> {rows[-1]['loss']:.3f} nats per token, "
        f"{summary['bits_per_byte']:.3f} bits per byte; {_gates(rows[-1]['health'])}"
    )
    shut = summary["alarms_ever"]
    return summary | {"problem": f"gate collapse of {', '.join(shut)}" if shut else None}


def _gates(health: dict[str, Any]) -> str:
    gains = health["quartiles"].get("mean_gain")
    if gains is None:
        return "no gates"
    return "mean gain by quarter of depth " + ", ".join(f"{gain:.3f}" for gain in gains.values())


def _say(options: Options) -> Any:
    return (lambda line: None) if options.json else (lambda line: print(line, file=sys.stdout, flush=True))
