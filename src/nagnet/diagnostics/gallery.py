"""All exhibits of a probe: what is measured of each model, how it is drawn, and what the numbers are called."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from nagnet.diagnostics import figures, history_figures, token_figures, update_figures
from nagnet.diagnostics.calibration import Judgement, judge
from nagnet.diagnostics.confidence import collect_predictions
from nagnet.diagnostics.geometry import gain_by_update, norm_by_depth, rotation_by_depth
from nagnet.diagnostics.health import stream_health
from nagnet.diagnostics.probed import ProbedModel
from nagnet.diagnostics.report import ReportTable
from nagnet.diagnostics.sinks import AttentionSinks, attention_sinks
from nagnet.diagnostics.skipping import skip_map
from nagnet.diagnostics.temperature import temperature_split
from nagnet.diagnostics.updates import (
    block_removal,
    modulation_histogram,
    outliers,
    preferred_directions,
    relative_update,
)

Measured = Mapping[str, Any]  # arm -> its numbers, None where the arm has no such thing


@dataclass(frozen=True)
class Drawing:
    """A figure of a measurement: file name, title, how it is drawn, and its caption with the definitions."""

    name: str
    title: str
    draw: Callable[[Any], Figure]
    caption: str


@dataclass(frozen=True)
class Exhibit:
    """One measurement of every model and its figures.

    Attributes:
        name: of the files with the numbers.
        measure: numbers of a model, a dataclass of arrays; None where it has no such thing.
        drawings: left out where no model has any. table: of the same numbers, or None.
    """

    name: str
    measure: Callable[[ProbedModel], Any]
    drawings: tuple[Drawing, ...]
    table: Callable[[Any], ReportTable] | None = None


def _health(probed: ProbedModel) -> Any:
    return [{"step": row["step"], "health": row["health"]} for row in probed.history if "health" in row] or None


def _gates(probed: ProbedModel) -> Any:
    rows = _health(probed) or []
    return [row for row in rows if "mean_gain" in row["health"]] or None


def _losses(probed: ProbedModel) -> Any:
    rows = [{key: row[key] for key in ("step", "tokens", "flops", "loss")} for row in probed.history if "loss" in row]
    return rows or None


def _bits(probed: ProbedModel) -> Any:
    keys = ("step", "tokens", "flops", "bits_per_byte")
    rows = [row for row in probed.history if row.get("bits_per_byte") is not None]
    return [{key: row[key] for key in keys} for row in rows] or None


def _drawn_losses(found: Measured) -> Figure:
    return figures.loss_figure({arm: rows for arm, rows in found.items() if rows})


def _deciles(found: Mapping[str, Judgement]) -> Figure:
    return figures.confidence_figure({arm: judged.summary for arm, judged in found.items()})


def confidence_table(judgements: Mapping[str, Judgement]) -> ReportTable:
    """AUROC with its interval, rank correlation with the loss, and calibration error, of each signal of each arm."""
    rows = []
    for arm, judged in judgements.items():
        for name, area in judged.area.items():
            control = name == "scale" and not judged.summary.scale_in_logits
            error = f"{100 * judged.reliability.calibration_error:.1f}%" if name == "max_probability" else ""
            signal = token_figures.SIGNALS[name] + (" (not in its logits)" if control else "")
            interval = f"{_number(area.low)} to {_number(area.high)}"
            rows.append([arm, signal, _number(area.area), interval, _number(judged.spearman_loss[name]), error])
    first = next(iter(judgements.values()))
    note = (
        f"{first.summary.n_tokens:,} tokens. AUROC: of the signal against top-1 correctness, 0.5 is chance; "
        f"interval: 95%, bootstrap over the {first.n_rows} rows of text. Spearman: rank correlation with the "
        "next-token loss, negative for a good signal. Calibration error: of the probability of the likeliest token, "
        "over 15 bins."
    )
    columns = ["model", "signal", "AUROC", "95% interval", "Spearman with loss", "calibration error"]
    return ReportTable("Which signal knows when the model is right", columns, rows, note)


def sinks_table(sinks: Mapping[str, AttentionSinks]) -> ReportTable:
    """Attention mass on the first key, the first four and the own position, by quarter of the depth."""
    quantities = {"first_key": "key 0", "first_four": "keys 0 to 3", "diagonal": "own position"}
    rows = []
    for arm, found in sinks.items():
        overall = {"first_key": found.first_key, "first_four": found.first_four, "diagonal": found.diagonal}
        for name, quarters in found.quartiles.items():
            values = [float(overall[name].nanmean()), *quarters]
            count = f"{found.layers_above_half} of {len(found.first_key)}" if name == "first_key" else ""
            rows.append([arm, quantities[name], *(_percent(value) for value in values), count])
    columns = ["model", "attention on", "all", "first quarter", "second", "third", "last", "blocks above 50%"]
    note = "Attention mass, averaged over sequences, heads and queries from position 1 on; quarters of the depth."
    return ReportTable("Attention sinks by depth", columns, rows, note)


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{100 * value:.1f}%"


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3f}"


EXHIBITS = (
    Exhibit(
        "norm_by_depth",
        lambda probed: norm_by_depth(probed.model, probed.text.tokens),
        (Drawing("norm_by_depth", "Stream norm by depth", figures.norm_figure, figures.NORM_CAPTION),),
    ),
    Exhibit(
        "rotation",
        lambda probed: rotation_by_depth(probed.model, probed.text.tokens),
        (Drawing("rotation", "Rotation", figures.rotation_figure, figures.ROTATION_CAPTION),),
    ),
    Exhibit(
        "relative_update",
        lambda probed: relative_update(probed.model, probed.text.tokens),
        (
            Drawing(
                "relative_update",
                "Relative size of each update",
                update_figures.relative_figure,
                update_figures.RELATIVE_CAPTION,
            ),
        ),
    ),
    Exhibit(
        "gain",
        lambda probed: gain_by_update(probed.model, probed.text.tokens),
        (Drawing("gain", "Cap and gain by update", figures.gain_figure, figures.GAIN_CAPTION),),
    ),
    Exhibit(
        "modulation",
        lambda probed: modulation_histogram(probed.model, probed.text.tokens),
        (Drawing("modulation", "Modulation", update_figures.modulation_figure, update_figures.MODULATION_CAPTION),),
    ),
    Exhibit(
        "temperature",
        lambda probed: temperature_split(probed.model, probed.text.tokens, probed.text.occurrences),
        (Drawing("temperature", "Temperature", update_figures.temperature_figure, update_figures.TEMPERATURE_CAPTION),),
    ),
    Exhibit(
        "alignment",
        lambda probed: stream_health(probed.model, probed.text.tokens),
        (
            Drawing(
                "alignment",
                "Alignment of branches with the stream",
                update_figures.alignment_figure,
                update_figures.ALIGNMENT_CAPTION,
            ),
        ),
    ),
    Exhibit(
        "preferred_directions",
        lambda probed: preferred_directions(probed.model, probed.text.tokens),
        (
            Drawing(
                "preferred_directions",
                "Preferred directions",
                update_figures.preferred_figure,
                update_figures.PREFERRED_CAPTION,
            ),
        ),
    ),
    Exhibit(
        "sinks",
        lambda probed: attention_sinks(probed.model, probed.text.sink_tokens),
        (
            Drawing("sinks", "Attention sinks", token_figures.sinks_figure, token_figures.SINKS_CAPTION),
            Drawing("attention_maps", "Attention maps", token_figures.maps_figure, token_figures.MAPS_CAPTION),
        ),
        sinks_table,
    ),
    Exhibit(
        "confidence",
        lambda probed: judge(collect_predictions(probed.model, probed.text.scored)),
        (
            Drawing("confidence", "Confidence", _deciles, figures.CONFIDENCE_CAPTION),
            Drawing(
                "loss_by_scale",
                "Confidence against loss",
                token_figures.loss_by_scale_figure,
                token_figures.LOSS_BY_SCALE_CAPTION,
            ),
            Drawing(
                "reliability",
                "Calibration and coverage",
                token_figures.reliability_figure,
                token_figures.RELIABILITY_CAPTION,
            ),
        ),
        confidence_table,
    ),
    Exhibit(
        "block_removal",
        lambda probed: block_removal(probed.model, probed.text.tokens),
        (Drawing("block_removal", "Without one block", update_figures.removal_figure, update_figures.REMOVAL_CAPTION),),
    ),
    Exhibit(
        "outliers",
        lambda probed: outliers(probed.model, probed.text.tokens),
        (Drawing("outliers", "Outliers", update_figures.outlier_figure, update_figures.OUTLIERS_CAPTION),),
    ),
    Exhibit(
        "skips",
        lambda probed: skip_map(probed.model, probed.text.tokens),
        (Drawing("skips", "Skipped sublayers", token_figures.skips_figure, token_figures.SKIPS_CAPTION),),
    ),
    Exhibit("loss", _losses, (Drawing("loss", "Training loss", _drawn_losses, figures.LOSS_CAPTION),)),
    Exhibit(
        "bits_per_byte",
        _bits,
        (
            Drawing(
                "bits_per_byte", "Bits per byte in training", history_figures.bits_figure, history_figures.BITS_CAPTION
            ),
        ),
    ),
    Exhibit(
        "health",
        _health,
        (
            Drawing(
                "stream_in_training",
                "The stream through training",
                history_figures.stream_figure,
                history_figures.STREAM_CAPTION,
            ),
        ),
    ),
    Exhibit(
        "gates",
        _gates,
        (
            Drawing(
                "gates_in_training",
                "The gates through training",
                history_figures.gates_figure,
                history_figures.GATES_CAPTION,
            ),
        ),
    ),
)


def measure(
    models: Mapping[str, ProbedModel], progress: Callable[[int, int], None] | None = None
) -> Iterator[tuple[Exhibit, dict[str, Any]]]:
    """Measures every exhibit of every model, one after another; exhibits that no model has are left out.

    Args:
        models: by arm. progress: called with (measurements done, measurements in all).
    """
    total = len(EXHIBITS) * len(models)
    for place, exhibit in enumerate(EXHIBITS):
        found = {}
        for arm, probed in models.items():
            found[arm] = exhibit.measure(probed)
            if progress is not None:
                progress(place * len(models) + len(found), total)
        if any(values is not None for values in found.values()):
            yield exhibit, found


def plain(value: Any) -> Any:
    """Numbers as JSON has them: dataclasses as objects, arrays as lists, NaN and infinities as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, torch.Tensor | np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def long_rows(found: Measured) -> Iterator[list[Any]]:
    """Numbers as rows of a table: model, quantity, up to three indices from 0, value; texts and absent arms left out.

    A quantity inside another has the names of both, such as ``reliability.accuracy``. Of metrics the first index is the
    row.
    """
    for arm, values in plain(found).items():
        if isinstance(values, list):
            for place, row in enumerate(values):
                yield from ([arm, *rest] for rest in _flat(row, "", (place,)))
        elif values is not None:
            yield from ([arm, *rest] for rest in _flat(values, "", ()))


def _flat(value: Any, name: str, indices: tuple[int, ...]) -> Iterator[list[Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _flat(part, f"{name}.{key}" if name else key, indices)
    elif isinstance(value, list):
        for place, part in enumerate(value):
            yield from _flat(part, name, (*indices, place))
    elif not isinstance(value, str):
        yield [name, *indices, *[""] * (3 - len(indices)), value]
