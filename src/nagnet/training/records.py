"""Records: a folder for each experiment, small enough for git, whose README is generated and yet holds what we learned.

A record is begun before the first step, with its question and the rule for success; results come in when there are any.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nagnet.errors import UserError
from nagnet.files import write_atomically
from nagnet.training.comparison import read_result
from nagnet.training.comparison_report import FIGURES_FOLDER, metrics_by_arm
from nagnet.training.plan import Plan
from nagnet.training.record_page import render_page

PROTOCOL_FILE = "protocol.json"
SUMMARY_FILE = "summary.json"
README_FILE = "README.md"
INDEX_FILE = "INDEX.md"
RUNS_FOLDER = "runs"
RECORDED_FIGURES = ("difference", "loss", "confidence", "gain")
MAX_ROWS = 200  # of metrics a run
DIGITS = 6  # significant, of a number in metrics
BEGIN = "<!-- generated from protocol.json and summary.json: begin. Write outside of these two marks. -->"
END = "<!-- generated: end -->"
_NUMBERED = re.compile(r"(\d{4})-([a-z0-9-]+)")


def begin_record(folder: Path, question: str | None, success_rule: str | None, plan: Plan, command: str) -> None:
    """Writes question, rule and protocol; before the first step.

    Args:
        folder: such as ``records/0003-readout``; where it is a record already, question and rule may be left out.
        command: that makes it.

    Raises:
        UserError: if the folder is no place for this record, or question or rule would change.
    """
    if not _NUMBERED.fullmatch(folder.name):
        raise UserError(f"record {folder.name!r}: name it by four digits and words, such as 0003-readout")
    stored = read_protocol(folder) if (folder / PROTOCOL_FILE).exists() else None
    if stored is None and folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty and no record of a comparison; name a new one")
    protocol = {
        "question": _asked("question", question, stored),
        "success_rule": _asked("success_rule", success_rule, stored),
        "command": command,
        "plan": plan.to_dict(),
    }
    write_atomically(folder / PROTOCOL_FILE, _json(protocol))
    (folder / SUMMARY_FILE).unlink(missing_ok=True)  # results of the plan before this one
    write_readme(folder)


def _asked(name: str, value: str | None, stored: Mapping[str, Any] | None) -> str:
    """What a record asks: given now, or stored before, but never changed."""
    before: str | None = stored[name] if stored else None
    words, option = name.replace("_", " "), name.replace("_", "-")
    if not value and not before:
        raise UserError(f"a record needs its {words} before the run; give it by --{option}")
    if value and before and value != before:
        raise UserError(f"the record has another {words} ({before!r}); name a new record")
    return value or before or ""


def finish_record(folder: Path, out: Path, summary: Mapping[str, Any], seed_folder: Callable[[int], Path]) -> None:
    """Takes over what a comparison left in ``out``, and writes README and index anew.

    Args:
        seed_folder: where the runs of a seed are.
    """
    shutil.rmtree(folder / RUNS_FOLDER, ignore_errors=True)
    for seed in summary["seeds"]:
        for arm, rows in metrics_by_arm(seed_folder(seed)).items():
            run = folder / RUNS_FOLDER / f"{arm}-seed-{seed}"
            result = read_result(seed_folder(seed), arm) or {}
            write_atomically(run / "config.json", _json(result["config"]))
            write_atomically(run / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in thin(rows)).encode())
    for name in RECORDED_FIGURES:
        figure = out / FIGURES_FOLDER / f"{name}.png"
        if figure.exists():
            write_atomically(folder / FIGURES_FOLDER / figure.name, figure.read_bytes())
    write_atomically(folder / SUMMARY_FILE, _json(summary))
    write_readme(folder)
    write_index(folder.parent)


def read_protocol(folder: Path) -> dict[str, Any]:
    """Question, success_rule, command and plan of a record.

    Raises:
        UserError: if it has none.
    """
    path = folder / PROTOCOL_FILE
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; name the folder of a record that a comparison wrote") from error
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error})") from error


def write_readme(folder: Path) -> None:
    """Writes the generated part of a record's README; all around it stays as it is."""
    path = folder / README_FILE
    summary_file = folder / SUMMARY_FILE
    summary = json.loads(summary_file.read_text(encoding="utf-8")) if summary_file.exists() else None
    figures = sorted(file.stem for file in (folder / FIGURES_FOLDER).glob("*.png")) if summary else []
    page = render_page(folder.name, read_protocol(folder), summary, [n for n in RECORDED_FIGURES if n in figures])
    generated = f"{BEGIN}\n{page}\n{END}"
    if path.exists():
        before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
        _, end, after = rest.partition(END)
        if not (begin and end):
            raise UserError(f"{path} lacks the marks {BEGIN!r} and {END!r}; put them around the part to be generated")
    else:
        number, name = folder.name.split("-", 1)
        before, after = f"# {number}: {name.replace('-', ' ')}\n\n", "\n\n## What we learned\n\nNot written yet.\n"
    write_atomically(path, (before + generated + after).encode())


def write_index(folder: Path) -> Path:
    """Writes INDEX.md: every record below ``folder``, with its question and verdict as its README has them.

    Raises:
        UserError: if there are no records.
    """
    entries = sorted(file.parent for file in folder.glob(f"*/{README_FILE}") if _NUMBERED.fullmatch(file.parent.name))
    if not entries:
        raise UserError(f"{folder} holds no records, folders such as 0003-readout with a README.md")
    lines = [
        "# Records",
        "",
        "One folder an experiment: question, protocol, numbers, verdict, and the command that makes it. This page is",
        f"generated from their READMEs: `nagnet compare --index {folder.name}`.",
        "",
        "| record | question | verdict |",
        "|---|---|---|",
    ]
    for entry in entries:
        text = (entry / README_FILE).read_text(encoding="utf-8")
        question, verdict = _paragraph(text, "Question"), _paragraph(text, "Verdict") or "in the record"
        lines.append(f"| [{entry.name}]({entry.name}/{README_FILE}) | {question} | {verdict} |")
    path = folder / INDEX_FILE
    write_atomically(path, ("\n".join(lines) + "\n").encode())
    return path


def _paragraph(text: str, head: str) -> str:
    """The paragraph that begins with ``**Head.**``, on one line and without what would break a table."""
    match = re.search(rf"^\*\*{head}\.\*\*(.*?)(?=\n\s*\n|\Z)", text, flags=re.DOTALL | re.MULTILINE)
    if match is None:
        return ""
    lines = [line.strip() for line in match[1].strip().splitlines()]
    joined = "; ".join(line[2:] for line in lines) if lines and lines[0].startswith("- ") else " ".join(lines)
    return joined.replace("|", "\\|")


def thin(rows: Sequence[Mapping[str, Any]], limit: int = MAX_ROWS) -> list[dict[str, Any]]:
    """At most ``limit`` rows: losses and gradient norms averaged over neighbouring steps, all else as at the last.

    Of the health of the gates the mean gain of each quarter of the depth stays, and how many updates the alarm named.
    """
    n = min(limit, len(rows))
    bounds = [round(i * len(rows) / n) for i in range(n + 1)]
    thinned = []
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        part = rows[start:stop]
        row = {name: part[-1][name] for name in ("step", "tokens", "flops", "lr_scale", "injection")}
        row["loss"] = statistics.fmean(entry["loss"] for entry in part)
        row["grad_norm"] = statistics.fmean(entry["grad_norm"]["total"] for entry in part)
        measured = [entry for entry in part if "mean_gain" in entry.get("health", {}).get("quartiles", {})]
        if measured:
            row["mean_gain"] = measured[-1]["health"]["quartiles"]["mean_gain"]
            row["alarms"] = len(measured[-1]["alarms"])
        thinned.append(_rounded(row))
    return thinned


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(part) for key, part in value.items()}
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
