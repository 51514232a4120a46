"""Matched comparison: arms that differ in the residual rule, one stream of batches, equal training FLOPs."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nagnet import ops
from nagnet.data.corpus import Corpus
from nagnet.data.loader import BatchLoader, encode_documents
from nagnet.data.tokenizer import Tokenizer, cached_tokenizer
from nagnet.diagnostics.probe import measuring
from nagnet.errors import UserError
from nagnet.evaluation.bits_per_byte import DocumentScores, documents_within, evaluate_documents
from nagnet.evaluation.statistics import paired_bootstrap_bits_per_byte
from nagnet.files import default_cache_dir, write_atomically
from nagnet.generation.sampler import sample_text
from nagnet.models.checkpoint import save_model
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.models.flops import parameter_counts
from nagnet.training.config import RunConfig
from nagnet.training.loop import Trainer, interrupt_flag
from nagnet.training.optimizer import describe_groups
from nagnet.training.progress import Progress

TREATMENT = ("residual", "readout")  # fields of ModelConfig in which arms may differ
SAMPLE_PROMPT = "def "
SAMPLE_TOKENS = 120
SAMPLE_TEMPERATURE = 0.8
EVAL_ROWS = 16

Echo = Callable[[str], None]


def build_arms(model: ModelConfig, names: Sequence[str]) -> dict[str, ModelConfig]:
    """One copy of ``model`` per residual rule named, each with the rule's own default readout.

    Raises:
        UserError: for an unknown rule, or fewer than two different arms.
    """
    if len(set(names)) < 2 or len(set(names)) != len(names):
        raise UserError(f"arms {', '.join(names) or '(none)'}: name two or more different ones")
    return {name: model.replace(residual=name) for name in names}


def undeclared_differences(arms: dict[str, ModelConfig]) -> list[str]:
    """Lines naming each config field, outside rule and readout, in which the arms differ."""
    values = {name: config.to_dict() for name, config in arms.items()}
    fields = [field for field in next(iter(values.values())) if field not in TREATMENT]
    return [
        f"{field}: " + ", ".join(f"{name} {value[field]}" for name, value in values.items())
        for field in fields
        if len({json.dumps(value[field]) for value in values.values()}) > 1
    ]


@dataclass
class Comparison:
    """A comparison about to run.

    Attributes:
        recipe: name of the recipe. config: the recipe.
        arms: arm name -> model; the first is compared with each of the others.
        corpus: text; the tokenizer is trained on its training part.
        out: folder for everything written. device, dtype: where and in which type products run.
        echo: prints one line for the user.
        allow_differences: run although arms differ in more than rule and readout.
    """

    recipe: str
    config: RunConfig
    arms: dict[str, ModelConfig]
    corpus: Corpus
    out: Path
    device: torch.device
    dtype: torch.dtype = torch.float32
    echo: Echo = print
    allow_differences: bool = False
    interrupted: bool = field(init=False, default=False)

    def __post_init__(self):
        differences = undeclared_differences(self.arms)
        for line in differences:
            self.echo(f"arms differ in {line}")
        if differences and not self.allow_differences:
            raise UserError(f"arms differ outside the residual rule in {'; '.join(differences)}; allow it explicitly")
        self.tokenizer: Tokenizer = cached_tokenizer(self.corpus, self.config.model.vocab_size)
        self.evaluated = documents_within(self.corpus.held_out, self.config.eval_bytes)
        if len(self.evaluated) < 2:
            raise UserError(
                f"{self.corpus.source}: {len(self.evaluated)} held-out document is too few for an interval; "
                "give more files, so that two or more are held out"
            )
        packed = encode_documents(self.corpus.train, self.tokenizer, cache_dir=default_cache_dir())
        loader = BatchLoader(packed, self.config.batch_size, self.config.seq_len, self.config.seed)
        self.trainers = {
            name: Trainer(name, self.config, model, loader, self.device, self.dtype)
            for name, model in self.arms.items()
        }

    def describe(self) -> None:
        """Prints what is about to be compared: corpus, budget, steps, and which optimizer gets which parameter."""
        corpus, config = self.corpus, self.config
        self.echo(
            f"corpus: {corpus.source}, {len(corpus.train)} documents, {corpus.train_bytes / 1e6:.1f} MB, "
            f"hash {corpus.content_hash[:12]}"
        )
        self.echo(f"device: {self.device}, products in {self.dtype}, residual backend {ops.get_backend()}")
        for name, trainer in self.trainers.items():
            total = parameter_counts(trainer.model_config)["total"]
            self.echo(
                f"{name}: {total:,} parameters, {trainer.n_steps} steps of {config.tokens_per_step:,} tokens, "
                f"{trainer.n_steps * trainer.flops_per_step:.4g} training FLOPs ({config.convention})"
            )
            for row in describe_groups(trainer.optimizers):
                self.echo(
                    f"  {row['role']:9} {row['optimizer']:5} lr {row['lr']:<6g} decay {row['weight_decay']:<4g} "
                    f"{row['parameters']:>9,} parameters in {row['tensors']} tensors, e.g. {row['example']}"
                )

    def train(self) -> None:
        """Trains all arms side by side: the arm that has spent the fewest FLOPs takes the next step.

        Step times of the arms are thus measured interleaved. Ctrl-C ends training after the current step, with
        all arms within one step of the same FLOPs. Metrics are written as the run goes, models at its
        end, however it ends.
        """
        for name, trainer in self.trainers.items():
            if self.config.compile:
                self.echo(f"{name}: compiling the block")
            trainer.prepare()
        total = sum(trainer.n_steps for trainer in self.trainers.values())
        last_loss = dict.fromkeys(self.trainers, float("nan"))
        try:
            with (
                interrupt_flag() as received,
                open(self.out / "metrics.jsonl", "w", encoding="utf-8", buffering=1) as metrics,
                Progress("training", total) as progress,
            ):
                while not received and (open_arms := [t for t in self.trainers.values() if not t.finished]):
                    trainer = min(open_arms, key=lambda trainer: trainer.flops)
                    row = trainer.step()
                    metrics.write(json.dumps(row) + "\n")
                    last_loss[trainer.name] = row["loss"]
                    losses = ", ".join(f"{name} {loss:.3f}" for name, loss in last_loss.items())
                    rate = self.config.tokens_per_step / row["seconds"]
                    done = sum(t.n_done for t in self.trainers.values())
                    progress.update(done, f"loss {losses}, {rate:,.0f} tokens/s")
                self.interrupted = bool(received)
        finally:
            for name, trainer in self.trainers.items():
                save_model(trainer.model, self.out / name)
            self.tokenizer.save(self.out / "tokenizer.json")

    def evaluate(self) -> dict[str, DocumentScores]:
        """Scores held-out documents with every arm, in float32 without compilation."""
        scores = {}
        for name, trainer in self.trainers.items():
            with Progress(f"evaluating {name}", 1.0) as progress, measuring(trainer.model):
                scores[name] = evaluate_documents(
                    self._scorer(trainer.model),
                    self.evaluated,
                    self.tokenizer,
                    self.config.seq_len,
                    EVAL_ROWS,
                    progress=lambda done, of, progress=progress: progress.update(done / of),
                )
        return scores

    def _scorer(self, model: Decoder) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda tokens, targets: model.score(tokens.to(self.device), targets.to(self.device))[0]

    def summary(self, scores: dict[str, DocumentScores]) -> dict[str, Any]:
        """All results as plain values; also the content of summary.json.

        Args:
            scores: of `evaluate`; empty after an interruption, which leaves bits per byte out.
        """
        first, *others = self.arms
        return {
            "recipe": self.recipe,
            "run": self.config.to_dict(),
            "corpus": {
                "source": self.corpus.source,
                "hash": self.corpus.content_hash,
                "documents": len(self.corpus.train) + len(self.corpus.held_out),
                "bytes": self.corpus.train_bytes + self.corpus.held_out_bytes,
                "dropped": dict(self.corpus.dropped),
            },
            "tokenizer_hash": self.tokenizer.content_hash,
            "budget": {"flops": self.config.flops, "convention": self.config.convention},
            "arms": {name: self._arm_summary(name, scores.get(name)) for name in self.arms},
            "differences": [_difference(first, other, scores) for other in others] if scores else [],
            "seed": self.config.seed,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "backend": ops.get_backend(),
            "threads": torch.get_num_threads(),
            "machine": {"platform": platform.platform(), "cpus": os.cpu_count()},
            "versions": {name: version(name) for name in ("nagnet", "torch")} | {"python": platform.python_version()},
            "git_commit": git_commit(),
            "interrupted": self.interrupted,
        }

    def _arm_summary(self, name: str, scores: DocumentScores | None) -> dict[str, Any]:
        trainer = self.trainers[name]
        seconds = trainer.step_seconds
        result = {
            "config": trainer.model_config.to_dict(),
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
        }
        if scores is None:
            return result
        with measuring(trainer.model):
            sample = sample_text(
                trainer.model,
                self.tokenizer,
                SAMPLE_PROMPT,
                SAMPLE_TOKENS,
                SAMPLE_TEMPERATURE,
                self.config.seed,
            )
        evaluated = {"documents": len(scores.names), "bytes": int(scores.n_bytes.sum())}
        return result | {"bits_per_byte": scores.bits_per_byte, "evaluated": evaluated, "sample": sample}

    def write_summary(self, summary: dict[str, Any]) -> Path:
        """Writes summary.json, complete or not at all."""
        path = self.out / "summary.json"
        write_atomically(path, (json.dumps(summary, indent=2) + "\n").encode())
        return path


def _difference(arm_a: str, arm_b: str, scores: dict[str, DocumentScores]) -> dict[str, Any]:
    result = paired_bootstrap_bits_per_byte(scores[arm_a], scores[arm_b])
    return {
        "arm_a": arm_a,
        "arm_b": arm_b,
        "bits_per_byte": result.difference,
        "low": result.low,
        "high": result.high,
        "confidence": result.confidence,
        "n_documents": result.n_documents,
    }


def git_commit() -> str | None:
    """The commit of the source this runs from, with ``-dirty`` where it was changed; None outside a checkout."""

    def git(*arguments: str) -> str:
        run = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
        return run.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # an installed copy may lie in another checkout
        return git("describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return None
