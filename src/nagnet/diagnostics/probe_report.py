"""Writes what a probe found: figures, the numbers behind them, and one HTML page that needs nothing beside it."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nagnet.diagnostics import page as pages
from nagnet.diagnostics.gallery import Exhibit, long_rows, plain
from nagnet.diagnostics.report import ReportTable, data_url
from nagnet.diagnostics.style import save_figure
from nagnet.files import write_atomically

FIGURES_FOLDER = "figures"
NUMBERS_FOLDER = "numbers"
REPORT_FILE = "report.html"
CSV_COLUMNS = ("model", "quantity", "index_1", "index_2", "index_3", "value")


@dataclass(frozen=True)
class ProbePage:
    """What stands around the figures of a report.

    Attributes:
        title: heading. models: a row for each. facts: name and value of how it was measured.
        versions: of the software. token_view: a fragment of HTML, or nothing.
    """

    title: str
    models: ReportTable
    facts: Sequence[tuple[str, str]]
    versions: Mapping[str, str]
    token_view: str = ""


def write_probe(
    out: Path,
    measured: Sequence[tuple[Exhibit, Mapping[str, Any]]],
    page: ProbePage,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Draws and writes what `measure` found.

    Args:
        out: an existing folder, for ``figures/*.png`` and ``.svg``, ``numbers/*.json`` and ``.csv``, ``report.html``.
        measured: exhibits with their numbers by arm. page: the rest of the report.
        progress: called with (exhibits drawn, exhibits in all).

    Returns:
        The numbers by exhibit and arm, as plain values.
    """
    shown, tables, numbers = [], [], {}
    for place, (exhibit, found) in enumerate(measured, start=1):
        numbers[exhibit.name] = plain(found)
        _write_numbers(out / NUMBERS_FOLDER, exhibit.name, numbers[exhibit.name], found)
        for drawing in exhibit.drawings:
            paths = {path.suffix: path for path in save_figure(drawing.draw(found), out / FIGURES_FOLDER, drawing.name)}
            shown.append((drawing.title, drawing.caption, data_url(paths[".svg"].read_bytes())))
        if exhibit.table is not None:
            tables.append(exhibit.table(found))
        if progress is not None:
            progress(place, len(measured))
    text = pages.render(
        "probe.html",
        title=page.title,
        models=page.models,
        figures=shown,
        tables=tables,
        facts=page.facts,
        versions=page.versions,
        token_view=page.token_view,
    )
    write_atomically(out / REPORT_FILE, text.encode())
    return numbers


def _write_numbers(folder: Path, name: str, values: Any, found: Mapping[str, Any]) -> None:
    write_atomically(folder / f"{name}.json", (json.dumps(values) + "\n").encode())
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    writer.writerows(long_rows(found))
    write_atomically(folder / f"{name}.csv", text.getvalue().encode())
