"""The report of a comparison: one HTML file that needs nothing beside it and no network."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nagnet.diagnostics import page
from nagnet.errors import UserError
from nagnet.files import write_atomically

TWIN = "pre_norm"
ONE_SEED = "one seed: interval over held-out documents, not over seeds"
_DASH = "–"


@dataclass(frozen=True)
class ReportTable:
    """A further table of a report: a title, column heads, rows of text, and a sentence on what they mean."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def write_report(
    path: Path,
    title: str,
    summary: Mapping[str, Any],
    figures: Sequence[tuple[str, str, bytes]],
    samples: Mapping[str, str] | None = None,
    tables: Sequence[ReportTable] = (),
) -> None:
    """Writes ``report.html``; it appears whole or not at all.

    Args:
        path: file to write.
        title: heading of the report.
        summary: what summary.json holds: ``recipe``, ``corpus``, ``budget``, ``arms`` (each with ``config``,
            ``parameters``, ``tokens``, ``flops``, ``steps``, ``median_step_seconds`` and ``peak_memory_bytes``, and
            once evaluated ``bits_per_byte`` and ``sample``), ``versions``, ``device``, ``seed``; optionally
            ``run`` (settings that all arms share, which an arm's own ``run`` overrides), ``seeds``, ``differences``,
            ``git_commit`` and ``interrupted``.
        figures: title, caption and SVG or PNG bytes of each, in order.
        samples: text by arm; by default the samples in the summary.
        tables: shown after the figures.

    Raises:
        UserError: if the summary lacks a key, an image is neither SVG nor PNG, jinja2 is not installed, or the
            file cannot be written.
    """
    try:
        content = _render(title, summary, figures, samples, tables)
    except KeyError as error:
        raise UserError(f"the summary lacks {error.args[0]!r}, which the report shows") from error
    try:
        write_atomically(path, content.encode())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _render(
    title: str,
    summary: Mapping[str, Any],
    figures: Sequence[tuple[str, str, bytes]],
    samples: Mapping[str, str] | None,
    tables: Sequence[ReportTable],
) -> str:
    arms = summary["arms"]
    if samples is None:
        samples = {name: arm["sample"] for name, arm in arms.items() if "sample" in arm}
    return page.render(
        "report.html",
        title=title,
        interrupted=summary.get("interrupted", False),
        verdicts=[_verdict(difference) for difference in summary.get("differences", ())],
        results=_results(arms),
        figures=[(heading, caption, data_url(image)) for heading, caption, image in figures],
        tables=tables,
        samples={_label(name): text for name, text in samples.items()},
        arm_names=[_label(name) for name in arms],
        settings=_settings(arms, summary.get("run", {})),
        facts=_facts(summary),
        versions=summary["versions"],
    )


def _verdict(difference: Mapping[str, Any]) -> dict[str, str]:
    """One paired difference in words and numbers."""
    value, low, high = (difference[name] for name in ("bits_per_byte", "low", "high"))
    first, second = _label(difference["arm_a"]), _label(difference["arm_b"])
    over_seeds = difference.get("basis") == "seeds"
    n_seeds = difference.get("n_seeds", 1)
    if not all(number is not None and math.isfinite(number) for number in (value, low, high)):
        words = "The difference is not a finite number: an arm diverged."
    elif over_seeds and low <= 0.0 <= high:
        words = f"No difference between {first} and {second} seen at {n_seeds} seeds."
    elif low <= 0.0 <= high:
        words = f"The held-out documents do not tell {first} and {second} apart."
    else:
        words = f"{first} needs {'fewer' if value < 0 else 'more'} bits per byte than {second}."
    if over_seeds:
        basis = f"Student's t over {n_seeds} seeds: {', '.join(map(_signed, difference['by_seed']))}"
    else:
        basis = f"paired bootstrap over {difference['n_documents'] or 0:,} documents; {ONE_SEED}"
    return {
        "words": words[0].upper() + words[1:],
        "pair": f"{first} minus {second}",
        "value": _signed(value),
        "interval": f"{_signed(low)} to {_signed(high)}",
        "confidence": f"{100 * difference['confidence']:g}%",
        "basis": basis,
    }


def _results(arms: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Rows of the results table; step times are relative to the pre-norm arm, or to the first without one."""
    twins = [arm for arm in arms.values() if arm["config"].get("residual") == TWIN] or list(arms.values())
    rows = []
    for name, arm in arms.items():
        step, twin_step = arm["median_step_seconds"], twins[0]["median_step_seconds"]
        ratio = f"{step / twin_step:.2f}×" if step and twin_step else _DASH
        rows.append(
            [
                _label(name),
                _number(arm.get("bits_per_byte"), ".4f"),
                _number(arm["tokens"], ",d"),
                _scientific(arm["flops"]),
                _number(arm["parameters"], ",d"),
                f"{1000 * step:.3g} ms" if step else _DASH,
                ratio,
                _bytes(arm["peak_memory_bytes"]),
            ]
        )
    return rows


def _settings(arms: Mapping[str, Mapping[str, Any]], run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The configurations side by side: key, value of each arm, and whether they differ.

    A model in ``run`` is left out: it is the one the arms' own were made from.
    """
    shared = {key: value for key, value in run.items() if key != "model"}
    flat = {
        name: dict(_flatten({"model": arm["config"], "run": shared | arm.get("run", {})})) for name, arm in arms.items()
    }
    keys = dict.fromkeys(key for config in flat.values() for key in config)
    rows = []
    for key in keys:
        values = [flat[name].get(key, _DASH) for name in arms]
        rows.append({"key": key, "values": values, "differs": len(set(values)) > 1})
    return rows


def _flatten(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Dotted keys and values as text; nested mappings are opened."""
    pairs: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            pairs += _flatten(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            pairs.append((f"{prefix}{key}", text))
    return pairs


def _facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    corpus, budget = summary["corpus"], summary["budget"]
    steps = ", ".join(f"{_label(name)} {arm['steps']:,}" for name, arm in summary["arms"].items())
    matched = "" if budget.get("match", "flops") == "flops" else f"; arms matched by {budget['match']}"
    return [
        ("Recipe", summary["recipe"]),
        ("Corpus", f"{corpus['source']}: {corpus['documents']:,} training documents, {corpus['tokens']:,} tokens"),
        ("Corpus hash", corpus["hash"]),
        (
            "Training budget",
            f"{_scientific(budget['flops'])} FLOPs an arm ({budget['convention']} convention){matched}",
        ),
        ("Optimizer steps", steps),
        ("Seeds", ", ".join(map(str, summary.get("seeds", [summary["seed"]])))),
        ("Device", summary["device"]),
        ("Git commit", summary.get("git_commit") or "not in a repository"),
    ]


def data_url(image: bytes) -> str:
    """An image as a URL that holds it. As an image, an SVG keeps its ids to itself and runs no script."""
    if image.startswith(b"\x89PNG\r\n\x1a\n"):
        kind = "image/png"
    elif image.lstrip().startswith((b"<?xml", b"<svg")):
        kind = "image/svg+xml"
    else:
        raise UserError("a figure of the report is neither SVG nor PNG")
    return f"data:{kind};base64,{base64.b64encode(image).decode()}"


def _label(arm: str) -> str:
    return {"none": "no residual"}.get(arm, arm.replace("_", "-"))


def _number(value: float | None, pattern: str) -> str:
    return _DASH if value is None else format(value, pattern)


def _scientific(value: float) -> str:
    """Four digits and a power of ten: 1.170 × 10¹³."""
    if value == 0:
        return "0"
    digits, power = f"{value:.3e}".split("e")
    return f"{digits} × 10{str(int(power)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def _signed(value: float | None) -> str:
    return _DASH if value is None else f"{value:+.4f}".replace("-", "−")


def _bytes(count: float | None) -> str:
    if not count:
        return _DASH
    power = min(3, int(math.log10(count) // 3))
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"
