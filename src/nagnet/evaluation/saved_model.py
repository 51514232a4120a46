"""A model as a program left it: the folder of its weights, its tokenizer, and the config of its run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nagnet.data.manifest import digest_of_file
from nagnet.data.tokenizer import Tokenizer
from nagnet.errors import UserError
from nagnet.files import (
    CHECKPOINTS_FOLDER,
    METRICS_FILE,
    MODEL_FOLDER,
    RECORD_FILE,
    RESULT_FILE,
    RUN_FILE,
    SUMMARY_FILE,
    TOKENIZER_FILE,
)
from nagnet.models.checkpoint import CONFIG_FILE, WEIGHTS_FILE


@dataclass(frozen=True)
class SavedModel:
    """Where the parts of a saved model are.

    Attributes:
        folder: what `nagnet.load_model` reads.
        tokenizer_file: the tokenizer it was trained with, or None for a model without one.
        run_config: of the run that made it, as plain values, or None.
        results: what that run measured of it, such as ``bits_per_byte`` and ``tokens``; empty where nothing is known.
        metrics_file: the metrics of that run, or None. arm: whose rows of it are the model's; None: all.
    """

    folder: Path
    tokenizer_file: Path | None
    run_config: dict[str, Any] | None
    results: dict[str, Any] = field(default_factory=dict)
    metrics_file: Path | None = None
    arm: str | None = None

    def tokenizer(self, vocab_size: int, file: Path | None = None) -> Tokenizer:
        """The model's tokenizer.

        Args:
            vocab_size: of the model. file: another one to take.

        Raises:
            UserError: if there is none, or it has another number of ids than the model.
        """
        chosen = file or self.tokenizer_file
        if chosen is None:
            raise UserError(f"{self.folder} has no {TOKENIZER_FILE}; name that of the model with --tokenizer")
        tokenizer = Tokenizer.load(chosen)
        if tokenizer.vocab_size != vocab_size:
            raise UserError(
                f"{chosen} has {tokenizer.vocab_size} ids, but the model in {self.folder} {vocab_size}; name the "
                "tokenizer the model was trained with"
            )
        return tokenizer

    def content_hash(self) -> str:
        """SHA-256 (hex) of the weights."""
        return digest_of_file(self.folder / WEIGHTS_FILE).hexdigest()


def find_model(path: str | Path) -> SavedModel:
    """Finds the model that a user means by a path.

    Args:
        path: a model folder (``nagnet.save_model``, an arm of ``nagnet compare``, ``nagnet import``), a checkpoint of
            ``nagnet train``, or the folder of such a run: then its model, or where it has none yet its last checkpoint.

    Raises:
        UserError: if there is no model, there are several, or a checkpoint is damaged.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path} is no folder; name a model folder, a checkpoint or a run")
    if _has_model(path):
        return _of_model_folder(path.absolute(), path)
    if (path / RUN_FILE).is_file():
        steps = sorted((path / CHECKPOINTS_FOLDER).glob("step-*"), key=lambda step: (len(step.name), step.name))
        for folder in (path / MODEL_FOLDER, *reversed(steps)):
            if _has_model(folder):
                return _of_model_folder(folder.absolute(), folder)
        raise UserError(f"{path} has neither a model nor a checkpoint yet; train it first")
    below = (file.parent for depth in ("*", "*/*") for file in path.glob(f"{depth}/{CONFIG_FILE}"))
    models = sorted(str(folder) for folder in below if _has_model(folder))
    if models:
        raise UserError(f"{path} holds {len(models)} models; name one of them, such as {models[0]}")
    raise UserError(f"{path} holds no model ({CONFIG_FILE} and {WEIGHTS_FILE}); name a model folder or a run")


def _has_model(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file() and (folder / WEIGHTS_FILE).is_file()


def _of_model_folder(folder: Path, shown: Path) -> SavedModel:
    """What belongs to a model folder by the place it has in what a run writes."""
    record, results, candidates = None, None, [folder / TOKENIZER_FILE]
    metrics, arm = None, None
    if (folder / RESULT_FILE).is_file():  # an arm of a comparison
        record = results = folder / RESULT_FILE
        metrics, arm = folder.parent / METRICS_FILE, folder.name
        candidates.append(folder.parent / TOKENIZER_FILE)
    elif (folder / RECORD_FILE).is_file():
        _check_hashes(shown)
        record, metrics = folder.parents[1] / RUN_FILE, folder.parents[1] / METRICS_FILE
        results = folder / RECORD_FILE if record.is_file() else None  # a foreign loop's score may be anything
        candidates.append(folder.parents[1] / TOKENIZER_FILE)
    elif folder.name == MODEL_FOLDER:
        record, results = folder.parent / RUN_FILE, folder.parent / SUMMARY_FILE
        metrics = folder.parent / METRICS_FILE
    tokenizer = next((file for file in candidates if file.is_file()), None)
    if metrics is not None and not metrics.is_file():
        metrics = None
    return SavedModel(shown, tokenizer, _run_config(record), _results(results), metrics, arm)


def _run_config(record: Path | None) -> dict[str, Any] | None:
    if record is None or not record.is_file():
        return None
    try:
        return dict(json.loads(record.read_text(encoding="utf-8"))["config"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{record} is damaged ({error}); it should hold the run's config") from error


def _results(file: Path | None) -> dict[str, Any]:
    if file is None or not file.is_file():
        return {}
    try:
        found = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"{file} is damaged ({error}); it should hold what the run measured") from error
    if file.name == RECORD_FILE:  # a checkpoint's score is bits per byte (`nagnet.training.run`)
        return {"steps": found.get("step"), "bits_per_byte": found.get("score")}
    return found


def _check_hashes(folder: Path) -> None:
    """Compares the model's files with the hashes that their checkpoint holds."""
    try:
        files = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))["files"]
        expected = {name: files[name]["sha256"] for name in (CONFIG_FILE, WEIGHTS_FILE)}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / RECORD_FILE} is damaged ({error}); use another checkpoint") from error
    for name, digest in expected.items():
        if digest_of_file(folder / name).hexdigest() != digest:
            raise UserError(f"{folder / name} is damaged: it is not as it was written; use another checkpoint")
