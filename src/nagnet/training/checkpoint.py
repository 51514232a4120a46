"""Checkpoints of a run: complete or invisible, exact to the bit, and nothing in them is ever unpickled."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from nagnet.errors import UserError
from nagnet.files import RECORD_FILE, write_atomically
from nagnet.models.checkpoint import CONFIG_FILE, WEIGHTS_FILE, save_model
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.training.distributed import World, on_main
from nagnet.training.parallel import Parallel
from nagnet.training.tensor_files import (
    allocate_state,
    check_tensor_file,
    model_tensors,
    optimizer_tensors,
    read_tensors,
    write_tensors,
)

FORMAT = 1
STATE_FOLDER = "training"
_NAME = re.compile(r"step-(\d+)")
_EXTRA = "tensors/"  # prefix of the names of a caller's own tensors


class Checkpoints:
    """The checkpoints in one folder, each in a folder ``step-0000100`` of its own (docs/checkpoints.md).

    Every process of a run calls the methods alike. The folder must be one that all of them see.

    Args:
        folder: made by the first save.
        keep_last: how many of the latest to keep, beside the one with the lowest score.
        config: plain values that a run which goes on from a checkpoint must share with the one that wrote it, such as
            its recipe and the hashes of its data.
    """

    def __init__(self, folder: str | Path, keep_last: int = 2, config: Mapping[str, Any] | None = None):
        if keep_last < 1:
            raise UserError(f"keep_last is {keep_last}; keep at least 1 checkpoint")
        self.folder = Path(folder)
        self.keep_last = keep_last
        self.config = _as_json(config or {})

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.folder / f"step-{step:07d}"

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, lowest first."""
        if not self.folder.is_dir():
            return []
        matches = (_NAME.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def latest(self) -> Path | None:
        """The checkpoint of the highest step, or None."""
        self._recover_replaced()
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def best(self) -> Path | None:
        """The checkpoint with the lowest score, the earliest of equal ones, or None where none has a score."""
        return self._best_of(self.steps())

    def save(
        self,
        step: int,
        model: Parallel | Decoder,
        optimizers: Iterable[Optimizer],
        values: Mapping[str, Any],
        score: float | None = None,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> Path:
        """Writes a checkpoint, then removes those that need not be kept.

        A run that went back to an earlier checkpoint leaves later ones behind; saving removes them too.

        Args:
            step: steps done. model: as trained; compiled or not.
            optimizers: their state is saved, their rates are not (they are functions of the step).
            values: whatever else the run needs to go on, as plain JSON values.
            score: lower is better; None or NaN for none.
            tensors: further tensors, the same in every process.

        Returns:
            Its folder.

        Raises:
            UserError: in every process, if it cannot be written (no space, no permission); nothing of it is left,
                and the checkpoints before are as they were.
        """
        parallel = _as_parallel(model)
        world, path = parallel.world, self.path(step)
        partial = self._hidden(path, "partial")
        state = optimizer_tensors(parallel.model, optimizers) | {_EXTRA + k: t for k, t in (tensors or {}).items()}
        whole = parallel.whole_model()
        record = {
            "format": FORMAT,
            "step": step,
            "score": None if score is None or score != score else float(score),
            "processes": world.size,
            "config": self.config,
            "values": dict(values),
        }
        try:
            on_main(world, lambda: self._begin(partial, whole))
            write_tensors(partial / STATE_FOLDER, state, world)
            on_main(world, lambda: self._complete(partial, path, record))
        except UserError as error:
            if world.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            raise UserError(f"{path} was not written, earlier checkpoints are as they were: {error}") from error
        on_main(world, lambda: self._remove_unneeded(step))
        return path

    def load(
        self,
        path: str | Path,
        model: Parallel | Decoder,
        optimizers: Iterable[Optimizer],
        tensors: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Any]:
        """Puts model, optimizers and ``tensors`` into the state they were in when ``path`` was saved, to the bit.

        The number of processes and the strategy may be others than when it was saved.

        Returns:
            The ``values`` that were saved with it.

        Raises:
            UserError: in every process, if it is damaged or no checkpoint, or of another model or config; the
                message names the file or the fields.
        """
        parallel, path, optimizers = _as_parallel(model), Path(path), list(optimizers)
        record = on_main(parallel.world, lambda: self._verified(path, parallel.model))
        read_tensors(path, model_tensors(parallel.model), parallel.world)
        states, wanted = allocate_state(path / STATE_FOLDER, parallel.model, optimizers)
        wanted |= {_EXTRA + name: tensor for name, tensor in (tensors or {}).items()}
        read_tensors(path / STATE_FOLDER, wanted, parallel.world)
        for optimizer in optimizers:
            optimizer.state.clear()
            for group in optimizer.param_groups:
                optimizer.state.update({p: states[p] for p in group["params"] if p in states})
        return record["values"]

    def _hidden(self, path: Path, why: str) -> Path:
        return self.folder / f".{path.name}.{why}"

    def _begin(self, partial: Path, whole: Decoder | None) -> None:
        self._recover_replaced()
        self._remove_hidden()
        partial.mkdir(parents=True)
        if whole is not None:
            save_model(whole, partial)

    def _complete(self, partial: Path, path: Path, record: dict[str, Any]) -> None:
        record["files"] = {
            file.relative_to(partial).as_posix(): {"bytes": file.stat().st_size, "sha256": _sha256(file)}
            for file in sorted(partial.rglob("*"))
            if file.is_file()
        }
        write_atomically(partial / RECORD_FILE, (json.dumps(record, indent=2) + "\n").encode())
        for folder in (partial / STATE_FOLDER, partial):
            _sync_folder(folder)
        if path.exists():
            os.rename(path, self._hidden(path, "replaced"))
        os.rename(partial, path)
        _sync_folder(self.folder)

    def _recover_replaced(self) -> None:
        """Brings back a checkpoint whose replacement was cut short between two renames."""
        for replaced in self.folder.glob(".step-*.replaced"):
            path = self.folder / replaced.name.removeprefix(".").removesuffix(".replaced")
            if not path.exists():
                with contextlib.suppress(FileNotFoundError):  # another process of the run was quicker
                    os.rename(replaced, path)

    def _remove_unneeded(self, newest: int) -> None:
        steps = [step for step in self.steps() if step <= newest]
        kept = {self.path(step) for step in steps[-self.keep_last :]} | {self._best_of(steps)}
        for path in map(self.path, self.steps()):
            if path not in kept:
                os.rename(path, self._hidden(path, "removed"))  # never half-removed under its own name
        self._remove_hidden()

    def _remove_hidden(self) -> None:
        for hidden in self.folder.glob(".step-*"):
            shutil.rmtree(hidden)

    def _best_of(self, steps: list[int]) -> Path | None:
        scored = [(score, step) for step in steps if (score := self._score(step)) is not None]
        return self.path(min(scored)[1]) if scored else None

    def _score(self, step: int) -> float | None:
        try:
            return json.loads((self.path(step) / RECORD_FILE).read_text(encoding="utf-8"))["score"]
        except (OSError, ValueError, KeyError, TypeError):  # damaged: `load` will say so
            return None

    def _verified(self, path: Path, model: Decoder) -> dict[str, Any]:
        """Reads a checkpoint's record and checks all its files against it."""
        record = _read_record(path)
        for name, expected in record["files"].items():
            file = path / name
            if not file.is_file():
                raise UserError(f"{file} is missing; use another checkpoint")
            if file.stat().st_size != expected["bytes"] or _sha256(file) != expected["sha256"]:
                raise UserError(f"{file} is damaged: it is not as it was written; use another checkpoint")
            if file.suffix == ".safetensors":
                check_tensor_file(file)
        present = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
        foreign = sorted(present - set(record["files"]) - {RECORD_FILE})
        if foreign:
            raise UserError(f"{path / foreign[0]} is no part of the checkpoint; move it elsewhere")
        try:
            model_config = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path / CONFIG_FILE} is damaged ({error}); use another checkpoint") from error
        for what, there, here in (
            ("model", _with_defaults(model_config), _as_json(model.config.to_dict())),
            ("config", _with_model_defaults(record["config"]), self.config),
        ):
            if changed := _differences(there, here):
                raise UserError(f"{path} is of another {what}: {'; '.join(changed)}")
        return record


def _as_parallel(model: Parallel | Decoder) -> Parallel:
    return model if isinstance(model, Parallel) else Parallel(model, World())


def _as_json(values: Any) -> Any:
    """Values as they come back from a JSON file: tuples as lists, all keys as text."""
    return json.loads(json.dumps(values))


def _read_record(path: Path) -> dict[str, Any]:
    file = path / RECORD_FILE
    if not file.is_file():
        raise UserError(f"{path} holds no {RECORD_FILE}; name a checkpoint, a folder such as checkpoints/step-0000100")
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        complete = {"files", "config", "values", "step"} <= record.keys() and {CONFIG_FILE, WEIGHTS_FILE} <= set(
            record["files"]
        )
    except (ValueError, AttributeError, KeyError, TypeError):
        complete, record = False, {"format": FORMAT}
    if record.get("format") != FORMAT:
        raise UserError(f"{file} has format {record.get('format')}; this version reads format {FORMAT}")
    if not complete:
        raise UserError(f"{file} is damaged; use another checkpoint")
    return record


def _differences(there: Any, here: Any, name: str = "") -> list[str]:
    """One entry for every field, nested ones with dots, that is not the same on both sides."""
    if isinstance(there, dict) and isinstance(here, dict):
        keys = [*there, *(key for key in here if key not in there)]
        missing = "(none)"
        return [
            entry
            for key in keys
            for entry in _differences(there.get(key, missing), here.get(key, missing), f"{name}.{key}".lstrip("."))
        ]
    return [] if there == here else [f"{name} is {there} there and {here} here"]


def _with_defaults(model_config: dict[str, Any]) -> dict[str, Any]:
    """A stored model config with fields that have come since, at their defaults; as it is where it is of no model."""
    try:
        return _as_json(ModelConfig.from_dict(model_config).to_dict())
    except (UserError, TypeError):
        return model_config


def _with_model_defaults(config: dict[str, Any]) -> dict[str, Any]:
    model = config.get("model")
    return config | {"model": _with_defaults(model)} if isinstance(model, dict) else config


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    """Makes the names in a folder survive a loss of power, where the system can."""
    if os.name == "nt" or not folder.is_dir():
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
