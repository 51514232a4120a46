"""Arms trained side by side on one seed: the same batches, step by step, and the same held-out text at the end."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nagnet.data.loader import PackedTokens, encode_documents
from nagnet.diagnostics.confidence import collect_confidence
from nagnet.diagnostics.health import stream_health
from nagnet.diagnostics.probed import scored_rows
from nagnet.evaluation.bits_per_byte import DocumentScores, documents_within
from nagnet.files import RESULT_FILE, TOKENIZER_FILE, write_atomically
from nagnet.generation.sampler import Sampling
from nagnet.generation.text import complete_texts
from nagnet.models.checkpoint import load_model, save_model
from nagnet.models.decoder import Decoder
from nagnet.models.flops import parameter_counts
from nagnet.training.config import RunConfig
from nagnet.training.distributed import World
from nagnet.training.environment import describe_environment
from nagnet.training.health import HealthMonitor, describe_alarms, health_tokens
from nagnet.training.loop import NonFiniteLoss, Trainer, interrupt_flag
from nagnet.training.metrics import METRICS_FILE, read_metrics, to_json
from nagnet.training.optimizer import describe_groups
from nagnet.training.progress import Progress
from nagnet.training.scoring import losses_of, score_documents
from nagnet.training.text import RunText

SAMPLE_PROMPT = "def "
SAMPLE_TOKENS = 120
SAMPLE_TEMPERATURE = 0.8
CONFIDENCE_ROWS = 48
CONFIDENCE_BYTES = 2_000_000  # of held-out text, from which the rows are taken
FINAL_LOSS_SHARE = 0.05  # of the steps, over which the last training loss is a mean

Echo = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """Arms to train on one seed, complete enough for a process of its own.

    Attributes:
        label: what it is, for the user. folder: for everything written.
        arms: label -> run config, with its budget and seed.
        device, dtype: names of torch's.
        sequential: one arm after another; else interleaved.
        trial: of a sweep: bits per byte are enough, and no model is kept.
    """

    label: str
    folder: Path
    arms: dict[str, RunConfig]
    device: str = "cpu"
    dtype: str = "float32"
    sequential: bool = False
    trial: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        arms = {name: config.to_dict() for name, config in self.arms.items()}
        return vars(self) | {"folder": str(self.folder), "arms": arms}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Job:
        """The job of `to_dict`."""
        arms = {name: RunConfig.from_dict(config) for name, config in values["arms"].items()}
        return cls(**(values | {"folder": Path(values["folder"]), "arms": arms}))

    def missing(self) -> list[str]:
        """Arms without a finished result of this very config."""
        return [name for name in self.arms if not self._is_finished(name)]

    def _is_finished(self, name: str) -> bool:
        result = self._own_result(name)
        return result is not None and result["finished"]

    def _own_result(self, name: str) -> dict[str, Any] | None:
        """What an arm of this very config left, or None."""
        result = read_result(self.folder, name)
        plain = json.loads(json.dumps(self.arms[name].to_dict()))
        return result if result is not None and result["config"] == plain else None

    def trained(self) -> dict[str, dict[str, Any]]:
        """Results of arms whose training is done and whose model is kept, but which were stopped before a score."""
        found = {} if self.trial else {name: self._own_result(name) for name in self.missing()}
        return {name: result for name, result in found.items() if result is not None and result.get("trained")}


def read_result(folder: Path, arm: str) -> dict[str, Any] | None:
    """What an arm's training left in a job's folder, finished or not."""
    try:
        return json.loads((folder / arm / RESULT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def run_job(job: Job, text: RunText, echo: Echo = print, describe: bool = True) -> None:
    """Trains and measures the arms that are missing, and writes their results.

    Args:
        describe: print first what is trained.

    Raises:
        KeyboardInterrupt: after Ctrl-C or SIGTERM; arms that were not finished leave partial results and their models.
    """
    for name, result in job.trained().items():
        _measure(job, text, result, load_model(job.folder / name).to(job.device))
    missing = job.missing()
    for names in [[name] for name in missing] if job.sequential else [missing] if missing else []:
        comparison = Comparison(job, names, text, echo)
        if describe and not job.trial:
            comparison.describe()
        if comparison.train():
            raise KeyboardInterrupt
        comparison.measure()
        if any(config.compile for config in job.arms.values()):
            torch.compiler.reset()  # else the next models count as recompilations of these, up to dynamo's limit


class ArmInTraining:
    """One arm of a job: its trainer and what is watched while it trains."""

    def __init__(self, name: str, config: RunConfig, text: RunText, device: torch.device, dtype: torch.dtype):
        self.name, self.config = name, config
        self.trainer = Trainer(name, config, config.model, text.loader(config, World()), device, dtype)
        self.monitor = HealthMonitor()
        self.losses: list[float] = []
        self.alarms: list[str] = []  # standing now
        self.alarms_ever: list[str] = []
        self.gates: Any = None  # of the last measurement
        self.diverged: str | None = None

    @property
    def finished(self) -> bool:
        """Whether no step is left to take."""
        return self.trainer.finished or self.diverged is not None

    @property
    def share_done(self) -> float:
        """Of its budget, 0 to 1."""
        return self.trainer.share_done

    def step(self, echo: Echo) -> dict[str, Any] | None:
        """One step and, where it is due, the health of the gates; None if the loss was not finite."""
        try:
            row = self.trainer.step()
        except NonFiniteLoss as error:
            self.diverged = str(error)
            echo(self.diverged)
            return None
        self.losses.append(row["loss"])
        interval = self.config.health_interval
        if self.trainer.finished or (interval and row["step"] % interval == 0):
            row |= self._check_health(row["step"], echo)
        return row

    def _check_health(self, step: int, echo: Echo) -> dict[str, Any]:
        inputs, _ = self.trainer.batch(step - 1)
        health = stream_health(self.trainer.model, health_tokens(inputs))
        row, alarms = self.monitor.check(health)
        if alarms and row["alarms"] != self.alarms:
            echo(f"{self.name}: {describe_alarms(alarms)}")
        self.alarms, self.gates = row.get("alarms", []), health.gates
        self.alarms_ever = list(dict.fromkeys(self.alarms_ever + self.alarms))
        return row

    def result(self) -> dict[str, Any]:
        """What its training came to so far, as plain values."""
        trainer = self.trainer
        seconds, losses = trainer.step_seconds, self.losses
        last = losses[-max(1, round(FINAL_LOSS_SHARE * len(losses))) :]
        return {
            "arm": self.name,
            "seed": self.config.seed,
            "config": self.config.to_dict(),
            "trained": self.finished and self.diverged is None,
            "finished": False,
            "diverged": self.diverged,
            "optimizers": describe_groups(trainer.optimizers),
            "parameters": parameter_counts(trainer.model_config)["total"],
            "steps": trainer.n_done,
            "tokens": trainer.tokens,
            "flops": trainer.flops,
            "compiled": trainer.compiled,
            "seconds": sum(seconds),
            "median_step_seconds": statistics.median(seconds) if seconds else None,
            "step_seconds_quartiles": statistics.quantiles(seconds, n=4) if len(seconds) > 1 else None,
            "peak_memory_bytes": trainer.peak_memory,
            "final_loss": statistics.fmean(last) if last else None,
            "health": self._gate_health(),
        }

    def _gate_health(self) -> dict[str, Any] | None:
        gates = self.gates
        if gates is None:
            return None
        return {
            "updates": len(gates.update_index),
            "dead_updates": gates.collapsed_updates,
            "alarms": self.alarms,
            "alarms_ever": self.alarms_ever,
            "mean_gain": gates.mean_gain,
            "initial_gain": gates.initial_gain,
        }


class Comparison:
    """Some arms of a job, trained interleaved."""

    def __init__(self, job: Job, names: Sequence[str], text: RunText, echo: Echo = print):
        self.job, self.text, self.echo = job, text, echo
        self.device, self.dtype = torch.device(job.device), getattr(torch, job.dtype)
        self.arms = {n: ArmInTraining(n, job.arms[n], text, self.device, self.dtype) for n in names}

    def describe(self) -> None:
        """Prints what is about to be trained: budget, steps, and which optimizer gets which parameter."""
        for name, arm in self.arms.items():
            total = parameter_counts(arm.config.model)["total"]
            self.echo(f"{name}: {total:,} parameters, {arm.trainer.budget.describe()}")
            for row in describe_groups(arm.trainer.optimizers):
                self.echo(
                    f"  {row['role']:9} {row['optimizer']:5} lr {row['lr']:<6g} decay {row['weight_decay']:<4g} "
                    f"{row['parameters']:>9,} parameters in {row['tensors']} tensors, e.g. {row['example']}"
                )

    def train(self) -> bool:
        """Trains the arms side by side: the one with the smallest share of its budget spent takes the next step.

        Step times are thus measured interleaved. Ctrl-C ends training after the current step, with all arms within one
        step of the same share. Metrics are written as it goes; results so far and models at the end, however it ends.

        Returns:
            Whether it was interrupted.
        """
        for name, arm in self.arms.items():
            if arm.config.compile and not self.job.trial:
                self.echo(f"{name}: compiling the block")
            arm.trainer.prepare()
        try:
            with interrupt_flag() as received, self._open_metrics() as metrics, self._progress() as progress:
                while not received and (waiting := [arm for arm in self.arms.values() if not arm.finished]):
                    arm = min(waiting, key=lambda arm: arm.share_done)
                    row = arm.step(self.echo)
                    if row is not None:
                        metrics.write(to_json(row) + "\n")
                        self._show(progress, row)
                return bool(received)
        finally:
            for name, arm in self.arms.items():
                if not self.job.trial:
                    save_model(arm.trainer.model, self.job.folder / name)
                _write_result(self.job, arm.result())
            self.text.tokenizer.save(self.job.folder / TOKENIZER_FILE)

    def _open_metrics(self) -> Any:
        """The job's metrics file, without rows that an earlier attempt at these arms left."""
        path = self.job.folder / METRICS_FILE
        rows = read_metrics(path) if path.is_file() else []
        kept = [row for row in rows if row["arm"] not in self.arms]
        write_atomically(path, "".join(to_json(row) + "\n" for row in kept).encode())
        return open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (line by line: a row outlives the process)

    def _progress(self) -> Progress:
        return Progress(f"{self.job.label}", float(len(self.arms)))

    def _show(self, progress: Progress, row: dict[str, Any]) -> None:
        losses = ", ".join(f"{name} {arm.losses[-1]:.3f}" for name, arm in self.arms.items() if arm.losses)
        rate = self.arms[row["arm"]].config.tokens_per_step / row["seconds"]
        done = sum(arm.share_done for arm in self.arms.values())
        progress.update(done, f"loss {losses}, {rate:,.0f} tokens/s")

    def measure(self) -> None:
        """Scores held-out documents with every arm and writes the finished results."""
        for arm in self.arms.values():
            _measure(self.job, self.text, arm.result(), arm.trainer.model)


def _measure(job: Job, text: RunText, result: dict[str, Any], model: Decoder) -> None:
    """Scores an arm, in float32 without compilation, and writes its finished result."""
    device = torch.device(job.device)
    result = (
        result | {"finished": True, "bits_per_byte": None} | describe_environment(device, getattr(torch, job.dtype))
    )
    if result["diverged"] is None:
        result |= _scores(job, text, result["arm"], model)
    _write_result(job, result)


def _scores(job: Job, text: RunText, name: str, model: Decoder) -> dict[str, Any]:
    config, device = job.arms[name], torch.device(job.device)
    with Progress(f"{job.label}: evaluating {name}", 1.0) as progress:
        scores = score_documents(
            model,
            losses_of(model),
            text.held_out,
            text.tokenizer,
            config.seq_len,
            device,
            World(),
            progress=lambda done, of: progress.update(done / of),
        )
    if not math.isfinite(scores.bits_per_byte):
        return {"diverged": f"{name}: the loss on held-out text is {scores.bits_per_byte}"}
    result = {
        "bits_per_byte": scores.bits_per_byte,
        "evaluated": {"documents": len(scores.names), "bytes": int(scores.n_bytes.sum())},
        "documents": _plain_scores(scores),
    }
    if job.trial:
        return result
    confidence = collect_confidence(model, scored_rows(pack_held_out(text), config.seq_len, device, CONFIDENCE_ROWS))
    sampling = Sampling(SAMPLE_TEMPERATURE, seed=config.seed)
    (sample,) = complete_texts(model, text.tokenizer, [SAMPLE_PROMPT], SAMPLE_TOKENS, sampling, past_the_end=True)
    return result | {"confidence": confidence.to_dict(), "sample": sample.prompt + sample.text}


def _write_result(job: Job, result: dict[str, Any]) -> None:
    write_atomically(job.folder / result["arm"] / RESULT_FILE, (json.dumps(result) + "\n").encode())


def pack_held_out(text: RunText) -> PackedTokens:
    """Held-out documents as tokens, 2 MB of them at most, for measurements that need no more."""
    return encode_documents(documents_within(text.held_out, CONFIDENCE_BYTES), text.tokenizer)


def _plain_scores(scores: DocumentScores) -> dict[str, Any]:
    columns = {"nats": scores.nats, "n_bytes": scores.n_bytes, "n_tokens": scores.n_tokens}
    return {"names": list(scores.names)} | {name: column.tolist() for name, column in columns.items()}
