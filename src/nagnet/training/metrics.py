"""Metrics of a run: one JSON object a line, always; TensorBoard and Weights & Biases beside it.

``metrics.jsonl`` has everything. The trackers get every single number of a row under its path (``health/injection``);
lists, one value per sublayer, stay in the file. JSON has no NaN and no infinity: they are written as the strings
"NaN", "Infinity" and "-Infinity", and `read_metrics` gives the numbers back.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import secrets
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from nagnet.errors import UserError
from nagnet.files import METRICS_FILE, write_atomically

TENSORBOARD_FOLDER = "tensorboard"
WANDB_ID_FILE = "wandb-id"

_FROM_TEXT = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(value: Any, indent: int | None = None) -> str:
    """Valid JSON of plain values, with "NaN", "Infinity" and "-Infinity" for what JSON cannot hold."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:  # rare, so looked for only now
        return json.dumps(_with_text(value), indent=indent, allow_nan=False)


def _with_text(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _with_text(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_with_text(part) for part in value]
    return value


def _with_numbers(value: Any) -> Any:
    if isinstance(value, str):
        return _FROM_TEXT.get(value, value)
    if isinstance(value, dict):
        return {key: _with_numbers(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_with_numbers(part) for part in value]
    return value


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Reads the rows that a `MetricsWriter` wrote, while it writes or after.

    Args:
        path: a ``metrics.jsonl``, or the folder that holds it.

    Returns:
        The rows in order. A last line that was cut off, as by a kill in the middle of a write, is left out.

    Raises:
        UserError: if there is no such file, or another line is damaged.
    """
    path = Path(path)
    path = path / METRICS_FILE if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"{path} does not exist; name the {METRICS_FILE} of a run")
    return [_with_numbers(row) for row, _ in _whole_lines(path)]


def _whole_lines(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Each row with its line; stops before a torn last line."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}: line {number} is damaged ({error}); delete that line") from error
            if not isinstance(row, dict):
                raise UserError(f"{path}: line {number} is no JSON object; delete that line")
            yield row, line


def _keep_rows_until(path: Path, step: int) -> None:
    """Drops rows beyond ``step`` and a torn last line, all at once; a file without them is not touched."""
    kept = [line for row, line in _whole_lines(path) if row.get("step", 0) <= step]
    content = b"".join(kept)
    if len(content) != path.stat().st_size:
        write_atomically(path, content)


def numbers_by_path(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a row under their paths (``health/quartiles/norm/q1``); lists, texts and truth values left out."""
    found: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            found |= numbers_by_path(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[prefix + key] = float(value)
    return found


def check_trackers(names: Iterable[str]) -> None:
    """Raises a UserError for an unknown tracker or one that is not installed, without importing any."""
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"unknown tracker {name}; trackers are {', '.join(TRACKERS)}")
        found = importlib.util.find_spec(name)
        # A folder of that name in the working directory, such as wandb itself makes, is found too: it has no origin.
        if found is None or found.origin is None:
            raise UserError(
                f"the tracker {name} is not installed: pip install 'nagnet[{_EXTRAS[name]}]', or leave it out"
            )


class MetricsWriter:
    """Writes the metrics of one run into its folder; on processes of another rank than 0 it does nothing at all.

    After a resume the files read like those of a run that never stopped: rows beyond the step of the checkpoint are
    dropped, and come again from the run itself.

    Args:
        folder: of the run; made if missing.
        trackers: any of ``tensorboard`` (event files in ``tensorboard/``) and ``wandb``.
        config: plain values that describe the run, for the trackers.
        resume_step: steps done by the checkpoint that the run goes on from; None for a new run.
        rank: of this process.

    Raises:
        UserError: for an unknown tracker, one that is not installed, or a new run in a folder that has metrics.
        OSError: if the folder cannot be written.
    """

    def __init__(
        self,
        folder: str | Path,
        trackers: Sequence[str] = ("tensorboard",),
        config: Mapping[str, Any] | None = None,
        resume_step: int | None = None,
        rank: int = 0,
    ):
        check_trackers(trackers)
        self._file: TextIO | None = None
        self._trackers: list[TensorBoardTracker | WandbTracker] = []
        if rank != 0:
            return
        folder = Path(folder)
        path = folder / METRICS_FILE
        if resume_step is None and path.exists():
            raise UserError(f"{path} belongs to another run; resume that run, or choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        if resume_step is not None and path.exists():
            _keep_rows_until(path, resume_step)
        self._trackers = [TRACKERS[name](folder, config or {}, resume_step) for name in trackers]
        # Line by line: a row outlives the process, however that ends.
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def write(self, row: Mapping[str, Any]) -> None:
        """Writes one row of plain values.

        Args:
            row: has ``step``, the steps done.

        Raises:
            OSError: if the disk is full.
        """
        if self._file is None:
            return
        self._file.write(to_json(row) + "\n")
        if self._trackers:
            numbers = numbers_by_path({key: value for key, value in row.items() if key != "step"})
            for tracker in self._trackers:
                tracker.write(row["step"], numbers)

    def flush(self) -> None:
        """Brings all files up to date on the disk; called before a checkpoint, no row up to it can get lost."""
        if self._file is not None:
            os.fsync(self._file.fileno())
        for tracker in self._trackers:
            tracker.flush()

    def close(self) -> None:
        """Ends all files; nothing can be written after it."""
        file, trackers = self._file, self._trackers
        self._file, self._trackers = None, []
        if file is not None:
            file.close()
        for tracker in trackers:
            tracker.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _wait_for_a_later_name(folder: Path) -> None:
    """TensorBoard reads event files in the order of their names, which begin with the second they were made in, and
    purges what it has read before: so the file of a process killed in this very second must not come last."""
    seconds = [file.name.split(".")[3] for file in folder.glob("events.out.tfevents.*")]
    left = max((int(second) + 1 for second in seconds if second.isdecimal()), default=0) - time.time()
    if 0 < left <= 1:  # more is a clock that was wrong
        time.sleep(left)


class TensorBoardTracker:
    """TensorBoard event files, with all numbers of a row in one event."""

    def __init__(self, folder: Path, config: Mapping[str, Any], resume_step: int | None):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of what it imports in turn
            from torch.utils.tensorboard import SummaryWriter
        self._summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        # Purged from here on: what an earlier process wrote after the checkpoint.
        purge_step = None if resume_step is None else resume_step + 1
        _wait_for_a_later_name(folder / TENSORBOARD_FOLDER)
        self._writer = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=purge_step)
        if config and resume_step is None:
            self._writer.add_text("config", f"```\n{to_json(config, indent=2)}\n```")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=number) for tag, number in numbers.items()]
        # One event for all: add_scalar makes one for each, at 0.1 ms apiece.
        writer: Any = self._writer.file_writer
        writer.add_summary(self._summary(value=values), step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run, found again by the id in the run's folder.

    Its server keeps the first number that it gets for a step. Since a resumed run repeats its steps exactly, nothing
    is lost by that.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], resume_step: int | None):
        wandb = importlib.import_module("wandb")
        id_file = folder / WANDB_ID_FILE
        if resume_step is None or not id_file.exists():
            write_atomically(id_file, secrets.token_hex(4).encode())
        run_id = id_file.read_text(encoding="utf-8")
        self._run = wandb.init(id=run_id, resume="allow", name=folder.name, dir=str(folder), config=dict(config))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def flush(self) -> None:
        """Nothing to do: wandb sends from a process of its own."""

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, type[TensorBoardTracker] | type[WandbTracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
}
_EXTRAS = {"tensorboard": "train", "wandb": "wandb"}
