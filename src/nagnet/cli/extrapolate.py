"""Predict the gap between two arms at a large budget from matched pairs at two or more smaller ones.

Pairs come from the summary.json of comparisons with several seeds, or as FLOPS:GAP:STANDARD_ERROR (the error may be
left out, then there is no interval). A power law is fitted where all gaps have one sign, else a line in log C; the
interval holds the noise of the seeds and nothing else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from nagnet.errors import UserError


@dataclass
class Options:
    """What to predict, from what."""

    budget: float
    """Training FLOPs to predict for, such as 3e19."""
    summaries: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """summary.json of comparisons, or the folders or records that hold them."""
    pair: tuple[str, ...] = ()
    """Further pairs as FLOPS:GAP or FLOPS:GAP:STANDARD_ERROR; gaps in bits per byte."""
    arm: str | None = None
    """Whose difference from the baseline; needed where a comparison has more than two arms."""
    confidence: float = 0.95
    """Coverage of the interval, between 0 and 1."""
    json: bool = False
    """Print JSON instead."""


def main(options: Options) -> None:
    """Prints the prediction."""
    from nagnet.training.extrapolation import extrapolate, pair_of_summary

    pairs = [pair_of_summary(_read(path), options.arm) for path in options.summaries]
    result = extrapolate([*pairs, *map(_parse, options.pair)], options.budget, options.confidence)
    if options.json:
        print(json.dumps(result.to_dict(), indent=2))
        return
    for pair, fitted in zip(result.pairs, result.fitted, strict=True):
        error = "" if pair.standard_error is None else f" +- {pair.standard_error:.4f}"
        print(f"{pair.budget:.3g} FLOPs: gap {pair.gap:+.4f}{error} bits per byte, the fit {fitted:+.4f}")
    law = f"gap ~ C^-{result.exponent:.3g}" if result.model == "power law" else f"{result.exponent:+.4f} per factor e"
    interval = ""
    if result.interval is not None:
        low, high = result.interval
        interval = f", {result.confidence:.0%} interval {low:+.4f} to {high:+.4f} (seed noise alone)"
    print(f"{result.budget:.3g} FLOPs: predicted gap {result.gap:+.4f}{interval}; {result.model}, {law}")
    for note in result.notes:
        print(note)


def _read(path: Path) -> Any:
    file = path / "summary.json" if path.is_dir() else path
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
        known = {"recipe", "budget", "differences"} <= summary.keys()
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; give the summary.json of a comparison") from error
    except (ValueError, AttributeError) as error:
        raise UserError(f"{file} is no summary of a comparison") from error
    if not known or not all("by_seed" in row for row in summary["differences"]):
        raise UserError(f"{file} is no summary of a comparison with seeds; make one with nagnet compare --seeds 3")
    return summary


def _parse(text: str) -> Any:
    from nagnet.training.extrapolation import Pair

    try:
        budget, gap, *error = (float(part) for part in text.split(":"))
        (standard_error,) = error or [None]
    except ValueError as wrong:
        raise UserError(f"pair {text!r}: write FLOPS:GAP or FLOPS:GAP:STANDARD_ERROR, such as 1e18:0.038") from wrong
    return Pair(budget, gap, standard_error)
