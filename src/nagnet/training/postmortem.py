"""What is saved when a loss or a gradient is no longer finite: enough to run the failing batch again elsewhere."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nagnet.diagnostics.health import StreamObserver, update_name
from nagnet.diagnostics.probe import UpdateStep, observe_updates
from nagnet.files import MODEL_FOLDER, write_atomically
from nagnet.models.checkpoint import save_model
from nagnet.models.decoder import Decoder
from nagnet.training.distributed import gather_from_ranks, is_sharded, whole_tensor
from nagnet.training.health import nonfinite_tensors
from nagnet.training.metrics import to_json

POSTMORTEM_FOLDER = "post-mortem"
REPORT_FILE = "report.json"
BATCH_FILE = "batch.safetensors"


@dataclass
class Finding:
    """What one process found when it ran its batch again, as plain values.

    Attributes:
        micro_batch_loss: mean loss of each part of the batch, nats per target.
        place: where the first value that is not finite appeared: ``the embedding``, ``update 9 (attention of block
            5)`` or ``the readout``; None if all were finite.
        update_index: l of that update, or None.
        part: what of it came first: ``gain``, ``branch`` (the sublayer's output) or ``state`` (the stream after it).
        micro_batch: the part of the batch it was in, from 0.
        statistics: of that update, the entries of ``health`` that belong to it.
        health: of that micro-batch (of the last one if all were finite), see `StreamHealth.to_dict`.
        parameters, gradients: names of those that are not finite.
        error: why the batch could not be run again, or None.
    """

    micro_batch_loss: list[float] = field(default_factory=list)
    place: str | None = None
    update_index: int | None = None
    part: str | None = None
    micro_batch: int | None = None
    statistics: dict[str, Any] = field(default_factory=dict)
    health: dict[str, Any] = field(default_factory=dict)
    parameters: list[str] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)
    error: str | None = None


def write_postmortem(
    folder: str | Path,
    model: Decoder,
    step: int,
    loss: float,
    batch: tuple[Tensor, Tensor],
    rows: Sequence[Mapping[str, Any]] = (),
    gradient_norm: float | None = None,
    micro_batches: int = 1,
) -> str:
    """Runs the batch again, looks for what went wrong first, and saves it all in ``folder/post-mortem``.

    Every process of a run calls this, at the same step and under the autocast of training; rank 0 alone writes:
    ``report.json``, the batch of the process that failed first (``batch.safetensors``: inputs and targets), and the
    model before the step (``model/``, for `nagnet.load_model`). Each file is complete or absent, the report comes
    last, and none is a pickle. Where one cannot be written, as on a full disk, the line still comes and says so.

    Args:
        folder: of the run.
        model: before the step, with the gradients of the failing batch.
        step: steps done before it. loss: mean loss in nats per target; ``gradient_norm``: total norm, if known.
        batch: inputs and targets of this process, [B, T].
        rows: the last metrics rows. micro_batches: parts in which the batch was run.

    Returns:
        One line for the user.
    """
    findings = gather_from_ranks(_examine(model, batch, micro_batches))
    worst = next((rank for rank, found in enumerate(findings) if found.place), 0)
    finding = findings[worst]
    # Of a sharded model each process sees its own part.
    finding.parameters = list(dict.fromkeys(name for found in findings for name in found.parameters))
    finding.gradients = list(dict.fromkeys(name for found in findings for name in found.gradients))
    bad_gradient = math.isfinite(loss) and gradient_norm is not None
    what = f"gradient norm is {gradient_norm}" if bad_gradient else f"loss is {loss}"
    line = f"{what} at step {step}: {_describe(finding)}"
    tensors = {name: tensor.cpu() for name, tensor in zip(("inputs", "targets"), batch, strict=True)}
    tensors = gather_from_ranks(tensors if _rank() == worst else None)[worst]
    whole = _whole_model(model, is_main=_rank() == 0)
    if whole is None or tensors is None:
        return line
    report = {"line": line, "step": step, "loss": loss, "gradient_norm": gradient_norm, "rank": worst}
    report |= asdict(finding) | {"last_rows": list(rows), "versions": _versions()}
    return f"{line}; {_save(Path(folder) / POSTMORTEM_FOLDER, report, tensors, whole)}"


def _examine(model: Decoder, batch: tuple[Tensor, Tensor], micro_batches: int) -> Finding:
    """Runs this process's batch forward again, part by part, and notes the first value that is not finite."""
    finding = Finding(**nonfinite_tensors(model)._asdict())
    try:
        for number, (inputs, targets) in enumerate(zip(*(part.chunk(micro_batches) for part in batch), strict=True)):
            _examine_part(model, inputs, targets, number, finding)
    except Exception as error:  # out of memory, most likely; what it is must not hide what it was called for
        finding.error = f"{type(error).__name__}: {error}".splitlines()[0]
    return finding


def _examine_part(model: Decoder, inputs: Tensor, targets: Tensor, number: int, finding: Finding) -> None:
    observer = StreamObserver()
    already = finding.place is not None

    def watch(step: UpdateStep) -> None:
        observer(step)
        if finding.place is not None:
            return
        if step.index == 1 and not _finite(*step.before):
            finding.place = "the embedding"
            return
        gain = () if step.gain is None else (step.gain,)
        for part, tensors in {"gain": gain, "branch": (step.branch,), "state": tuple(step.after)}.items():
            if not _finite(*tensors):
                finding.place, finding.update_index, finding.part = update_name(step.index), step.index, part
                return

    # No early end: where the model is sharded, the other processes need this one for every part.
    with observe_updates(model, watch):
        loss = float(model.loss(inputs, targets))
    finding.micro_batch_loss.append(loss)
    if finding.place is None and not math.isfinite(loss):
        finding.place = "the readout"
    if already:
        return
    finding.health = observer.health().to_dict()
    finding.micro_batch = number if finding.place is not None else None
    if finding.update_index is not None:
        place = finding.update_index - 1
        lists = {name: values for name, values in finding.health.items() if isinstance(values, list)}
        finding.statistics = {name: values[place] for name, values in lists.items()}


def _finite(*tensors: Tensor) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def _describe(finding: Finding) -> str:
    if finding.place is not None:
        parts = [f"first non-finite at {finding.place}"]
    elif finding.error is not None:
        parts = [f"the batch could not be run again ({finding.error})"]
    else:
        parts = ["the forward pass is finite when it is run again"]
    for word, names in (("gradient", finding.gradients), ("parameter", finding.parameters)):
        if len(names) == 1:
            parts.append(f"{word} {names[0]}")
        elif names:
            parts.append(f"{word}s of {len(names)} tensors, the first {names[0]}")
    return "; ".join(parts)


def _save(folder: Path, report: dict[str, Any], batch: dict[str, Tensor], model: Decoder) -> str:
    """Saves what there is room for; says where, or why not."""

    def save_batch() -> None:
        from safetensors.torch import save

        # Cloned, as inputs and targets may be views of one tensor.
        content = save({name: tensor.clone().contiguous() for name, tensor in batch.items()})
        write_atomically(folder / BATCH_FILE, content)

    failures: dict[str, str] = {}

    def attempt(name: str, save: Callable[[], object]) -> None:
        try:
            save()
        except Exception as error:  # most likely no space; what it is must not hide what this was called for
            failures[name] = getattr(error, "strerror", None) or str(error)

    # The report first goes and last comes: while there is one, it is about the files beside it.
    attempt(REPORT_FILE, lambda: (folder / REPORT_FILE).unlink(missing_ok=True))
    attempt(BATCH_FILE, save_batch)
    attempt(MODEL_FOLDER, lambda: save_model(model, folder / MODEL_FOLDER))
    content = to_json(report | {"not_saved": dict(failures)}, indent=2)
    attempt(REPORT_FILE, lambda: write_atomically(folder / REPORT_FILE, (content + "\n").encode()))
    if REPORT_FILE in failures:
        return f"{folder / REPORT_FILE} could not be written ({failures[REPORT_FILE]})"
    lost = "".join(f", without {name} ({reason})" for name, reason in failures.items())
    return f"see {folder / REPORT_FILE}{lost}"


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("nagnet", "torch")} | {"python": platform.python_version()}


def _whole_model(model: Decoder, is_main: bool) -> Decoder | None:
    """A model with all parameters in the main process, None elsewhere; every process must call this."""
    state = model.state_dict()
    if not any(is_sharded(tensor) for tensor in state.values()):
        return model if is_main else None
    tensors = {}
    for name, tensor in state.items():  # one at a time, and on the CPU: the device may have room for its part alone
        whole = whole_tensor(tensor)
        if is_main:
            tensors[name] = whole.cpu()
    if not is_main:
        return None
    with torch.device("meta"):
        decoder = Decoder(model.config)
    decoder.load_state_dict(tensors, assign=True)
    return decoder


def _rank() -> int:
    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if joined else 0
