"""One training run from its first step to its last, however often it is stopped in between.

`Run.train` is the loop: step, measure, evaluate, save. What a step does is in `nagnet.training.loop`.
"""

from __future__ import annotations

import json
import math
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nagnet import ops
from nagnet.diagnostics.health import stream_health
from nagnet.evaluation.bits_per_byte import DocumentScores
from nagnet.files import CHECKPOINTS_FOLDER, MODEL_FOLDER, RUN_FILE, SUMMARY_FILE, TOKENIZER_FILE, write_atomically
from nagnet.models.checkpoint import save_model
from nagnet.models.flops import parameter_counts
from nagnet.training.budget import dollars_to_finish, format_mfu, mfu
from nagnet.training.checkpoint import Checkpoints
from nagnet.training.compute import autocast, device_name
from nagnet.training.config import RunConfig
from nagnet.training.distributed import World, any_rank, on_main
from nagnet.training.health import HealthMonitor, describe_alarms, health_tokens
from nagnet.training.loop import NonFiniteLoss, Trainer, interrupt_flag
from nagnet.training.metrics import METRICS_FILE, MetricsWriter, read_metrics
from nagnet.training.optimizer import describe_groups, scale_rates
from nagnet.training.postmortem import write_postmortem
from nagnet.training.progress import Progress, format_seconds
from nagnet.training.scoring import losses_of, score_documents
from nagnet.training.text import RunText

LAST_ROWS = 5  # of metrics, that a post-mortem quotes
# What may change when a run is resumed: nothing that its parameters depend on, but for rounding.
CHANGEABLE = (
    "init_from",
    "compile",
    "activation_checkpointing",
    "strategy",
    "micro_batches",
    "device_batch_size",
    "data",  # a folder may have moved; the hash of its content may not
    "log_interval",
    "health_interval",
    "eval_interval",
    "checkpoint_interval",
    "keep_checkpoints",
)


@dataclass
class Run:
    """A run about to start or to go on.

    Attributes:
        recipe: name of the recipe. config: the recipe.
        text: what it reads. out: folder for everything written.
        device, dtype: where and in which type products run. world: the processes.
        trackers: beside metrics.jsonl. echo: prints one line for the user, in the main process.
        peak_flops: of one device, in FLOP/s, where the table has none. dollars_per_hour: price of all devices.
    """

    recipe: str
    config: RunConfig
    text: RunText
    out: Path
    device: torch.device
    dtype: torch.dtype
    world: World = field(default_factory=World)
    trackers: Sequence[str] = ("tensorboard",)
    echo: Callable[[str], None] = print
    peak_flops: float | None = None
    dollars_per_hour: float | None = None
    stopped_by: int | None = field(init=False, default=None)

    def __post_init__(self):
        loader = self.text.loader(self.config, self.world)
        self.trainer = Trainer(
            self.config.model.residual, self.config, self.config.model, loader, self.device, self.dtype, self.world
        )
        self.checkpoints = Checkpoints(
            self.out / CHECKPOINTS_FOLDER, self.config.keep_checkpoints, self._unchangeable()
        )
        self.monitor = HealthMonitor()
        self.alarms: list[str] = []  # standing now
        self.alarms_ever: list[str] = []
        self.bits_per_byte: float | None = None
        self._mfu(1.0)  # both refuse bad options, before anything is written
        dollars_to_finish(0.0, self.dollars_per_hour)
        self.losses: list[float] = []  # since the last line of metrics

    def describe(self) -> None:
        """Prints what is about to be trained: text, budget, and which optimizer gets which parameter."""
        trainer, config = self.trainer, self.config
        tokens = self.text.tokens
        self.echo(
            f"text: {self.text.source}, {tokens.n_documents:,} documents, {tokens.n_tokens:,} tokens "
            f"({trainer.budget.tokens / tokens.n_tokens:.2f} epochs), hash {tokens.content_hash[:12]}"
        )
        processes = f", {self.world.size} processes ({config.strategy})" if self.world.size > 1 else ""
        self.echo(f"device: {self.device}, products in {self.dtype}, residual backend {ops.get_backend()}{processes}")
        total = parameter_counts(config.model)["total"]
        self.echo(f"{trainer.name}: {total:,} parameters, {trainer.budget.describe()}")
        _, scalings = scale_rates(config.optimizer, config.tokens_per_step, config.model.d_model)
        for line in scalings:
            self.echo(f"  {line}")
        for row in describe_groups(trainer.optimizers):
            averages = ", ".join(f"{value:g}" for value in row["averages"])
            self.echo(
                f"  {row['role']:9} {row['optimizer']:5} lr {row['lr']:<8.4g} decay {row['weight_decay']:<7.4g} "
                f"averages {averages:11} {row['parameters']:>11,} parameters in {row['tensors']} tensors, "
                f"e.g. {row['example']}"
            )

    def resume(self) -> bool:
        """Goes on from the last checkpoint, if there is one; returns whether there was.

        Raises:
            UserError: if the checkpoint belongs to another run, naming what differs in config or text.
        """
        path = on_main(self.world, self.checkpoints.latest)
        if path is None:
            return False
        values = self.checkpoints.load(path, self.trainer.parallel, self.trainer.optimizers)
        self.trainer.load_state_dict(values["trainer"])
        self.monitor.load_state_dict(values["monitor"])
        self.alarms, self.alarms_ever, self.losses = values["alarms"], values["alarms_ever"], values["losses"]
        self.bits_per_byte = values["bits_per_byte"]
        self.echo(f"resuming from {path}, {self.trainer.n_done} of {self.trainer.n_steps} steps done")
        return True

    def _record(self) -> dict[str, Any]:
        return {"recipe": self.recipe, "config": self.config.to_dict(), "text_hash": self.text.tokens.content_hash}

    def _unchangeable(self) -> dict[str, Any]:
        config = {name: value for name, value in self.config.to_dict().items() if name not in CHANGEABLE}
        return config | {"text (hash of its tokens)": self.text.tokens.content_hash}

    def train(self) -> dict[str, Any]:
        """Trains to the end of the budget, or until Ctrl-C or SIGTERM, after which `resume` can go on.

        Returns:
            The summary that is also written to summary.json.

        Raises:
            NonFiniteLoss: with a post-mortem in the run's folder; the last checkpoint stays.
        """
        trainer, config = self.trainer, self.config
        resumed = trainer.n_done > 0
        on_main(self.world, self._write_record)
        if config.compile:
            self.echo("compiling the block")
        trainer.prepare()
        start, first = time.monotonic(), trainer.n_done
        writer = MetricsWriter(
            self.out, self.trackers, self._record(), trainer.n_done if resumed else None, self.world.rank
        )
        with interrupt_flag() as received, writer, self._progress() as progress:
            while not trainer.finished:
                row = self._step()
                self.losses.append(row["loss"])
                row |= self._measure(row["step"])
                if self._due(config.log_interval) or "health" in row or "bits_per_byte" in row:
                    row["loss"] = statistics.fmean(self.losses)
                    self.losses = []
                    row |= self._rates(row)
                    writer.write(row)
                stop = any_rank(bool(received))
                if stop or self._due(config.checkpoint_interval):
                    writer.flush()
                    self.save(row.get("bits_per_byte"))
                self._show(progress, row, start, first)
                if stop and not trainer.finished:
                    self.stopped_by = received[0] if received else signal.SIGTERM
                    break
        summary = self.summary()
        on_main(self.world, lambda: self._write_json(SUMMARY_FILE, summary))
        if trainer.finished:
            self._write_model()
        return summary

    def _step(self) -> dict[str, Any]:
        trainer = self.trainer
        try:
            return trainer.step()
        except NonFiniteLoss as error:
            with autocast(self.device, self.dtype):
                line = write_postmortem(
                    self.out,
                    trainer.model,
                    error.step,
                    error.loss,
                    trainer.batch(error.step),
                    _last_rows(self.out),
                    error.gradient_norm,
                    trainer.n_parts,
                )
            raise NonFiniteLoss(line, error.step, error.loss, error.gradient_norm) from error

    def _due(self, interval: int) -> bool:
        """Whether something of this interval in steps is due after the present step; always after the last."""
        return self.trainer.finished or (interval > 0 and self.trainer.n_done % interval == 0)

    def _measure(self, step: int) -> dict[str, Any]:
        """Health and bits per byte, where they are due."""
        row: dict[str, Any] = {}
        if self._due(self.config.health_interval):
            inputs, _ = self.trainer.batch(step - 1)
            row, alarms = self.monitor.check(stream_health(self.trainer.model, health_tokens(inputs)))
            if alarms and row["alarms"] != self.alarms:
                self.echo(describe_alarms(alarms))
            self.alarms = row.get("alarms", [])
            self.alarms_ever = list(dict.fromkeys(self.alarms_ever + self.alarms))
        if self._due(self.config.eval_interval):
            self.bits_per_byte = row["bits_per_byte"] = self.evaluate().bits_per_byte
        return row

    def evaluate(self) -> DocumentScores:
        """Scores the held-out documents without compilation, shared among the processes; in float32 but under fsdp."""
        model, text = self.trainer.model, self.text
        share = self.world if self.config.strategy == "ddp" else World()  # sharded models run in all processes at once
        return score_documents(
            model, losses_of(model), text.held_out, text.tokenizer, self.config.seq_len, self.device, share
        )

    def save(self, score: float | None) -> None:
        """Writes a checkpoint; every process must call this.

        Args:
            score: bits per byte of these parameters, if they were evaluated.
        """
        values = {
            "trainer": self.trainer.state_dict(),
            "monitor": self.monitor.state_dict(),
            "alarms": self.alarms,
            "alarms_ever": self.alarms_ever,
            "losses": self.losses,
            "bits_per_byte": self.bits_per_byte,
        }
        trainer = self.trainer
        self.checkpoints.save(trainer.n_done, trainer.parallel, trainer.optimizers, values, score)

    def _progress(self) -> Progress:
        return Progress("training", 1.0, quiet=not self.world.is_main)

    def _rates(self, row: dict[str, Any]) -> dict[str, float]:
        """Tokens per second over all processes, and the share of the devices' peak where that is known."""
        rates = {"tokens_per_second": self.config.tokens_per_step / row["seconds"]}
        share = self._mfu(row["seconds"])
        return rates if share is None else rates | {"mfu": share}

    def _mfu(self, seconds: float) -> float | None:
        rate = self.trainer.last_step_flops / seconds / self.world.size
        return mfu(rate, device_name(self.device), self.dtype, self.peak_flops)

    def _show(self, progress: Progress, row: dict[str, Any], start: float, first: int) -> None:
        trainer = self.trainer
        parts = [f"loss {row['loss']:.3f}"]
        if self.bits_per_byte is not None:
            parts.append(f"{self.bits_per_byte:.3f} bits/byte")
        parts.append(f"{self.config.tokens_per_step / row['seconds']:,.0f} tokens/s")
        parts.append(f"MFU {format_mfu(self._mfu(row['seconds']))}")
        seconds_left = (time.monotonic() - start) / (trainer.n_done - first) * (trainer.n_steps - trainer.n_done)
        dollars = dollars_to_finish(seconds_left, self.dollars_per_hour)
        if dollars is not None:
            parts.append(f"${dollars:,.2f} to go")
        progress.update(trainer.share_done, ", ".join(parts))

    def summary(self) -> dict[str, Any]:
        """The run's results so far, as plain values."""
        trainer, seconds = self.trainer, self.trainer.step_seconds
        return self._record() | {
            "steps": trainer.n_done,
            "finished": trainer.finished,
            "tokens": trainer.tokens,
            "flops": trainer.flops,
            "convention": self.config.convention,
            "bits_per_byte": self.bits_per_byte,
            "alarms": self.alarms,
            "alarms_ever": self.alarms_ever,
            "parameters": parameter_counts(self.config.model)["total"],
            "processes": self.world.size,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "compiled": trainer.compiled,
            "median_step_seconds": statistics.median(seconds) if seconds else None,
            "mfu": self._mfu(statistics.median(seconds)) if seconds else None,
            "peak_memory_bytes": trainer.peak_memory,
        }

    def report(self, summary: dict[str, Any]) -> None:
        """Prints the result in a few lines."""
        score = summary["bits_per_byte"]
        bits = "not evaluated" if score is None or math.isnan(score) else f"{score:.4f} bits per byte"
        state = "finished" if summary["finished"] else "stopped; the same command with --resume goes on"
        self.echo(f"{state}: {summary['steps']:,} steps, {summary['tokens']:,} tokens, {bits}")
        if summary["median_step_seconds"]:
            total = format_seconds(sum(self.trainer.step_seconds))
            self.echo(
                f"step {summary['median_step_seconds'] * 1e3:,.0f} ms (median), {total} in steps, "
                f"peak memory {summary['peak_memory_bytes'] / 2**20:,.0f} MiB, MFU {format_mfu(summary['mfu'])}"
            )
        where = MODEL_FOLDER if summary["finished"] else CHECKPOINTS_FOLDER
        self.echo(f"in {self.out}: {where}/, metrics.jsonl, {SUMMARY_FILE}")

    def _write_record(self) -> None:
        self._write_json(RUN_FILE, self._record())
        self.text.tokenizer.save(self.out / TOKENIZER_FILE)

    def _write_json(self, name: str, value: dict[str, Any]) -> None:
        write_atomically(self.out / name, (json.dumps(value, indent=2) + "\n").encode())

    def _write_model(self) -> None:
        model = self.trainer.parallel.whole_model()

        def write() -> None:
            assert model is not None
            save_model(model, self.out / MODEL_FOLDER)
            self.text.tokenizer.save(self.out / MODEL_FOLDER / TOKENIZER_FILE)

        on_main(self.world, write)


def _last_rows(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder)[-LAST_ROWS:] if (folder / METRICS_FILE).exists() else []
