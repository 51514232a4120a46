"""A whole comparison: tuning, every seed of every arm, and the summary; it can be stopped and gone on with."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nagnet.errors import UserError
from nagnet.files import write_atomically
from nagnet.training.comparison import Job, read_result, run_job
from nagnet.training.comparison_summary import summarize
from nagnet.training.config import RunConfig
from nagnet.training.distributed import World
from nagnet.training.environment import describe_environment
from nagnet.training.loop import Trainer
from nagnet.training.plan import Plan, matched_configs, undeclared
from nagnet.training.processes import run_in_processes
from nagnet.training.sweep import TrialScore, trial_flops, tune
from nagnet.training.text import RunText

PLAN_FILE = "plan.json"
SUMMARY_FILE = "summary.json"
STEP_SECONDS_FILE = "step-seconds.json"
TRIALS_FOLDER = "trials"
WARM_UP_STEPS, TIMED_STEPS = 2, 20


@dataclass
class Experiment:
    """A comparison about to run, or to go on.

    Attributes:
        plan: what to do. text: what all arms read. out: folder for everything written.
        device, dtype: where and in which type products run.
        n_jobs: seeds (or trials) that run at a time; more than one in processes of their own, with ``threads`` each.
        echo: prints one line for the user.
    """

    plan: Plan
    text: RunText
    out: Path
    device: torch.device
    dtype: torch.dtype = torch.float32
    n_jobs: int = 1
    threads: int = field(default_factory=torch.get_num_threads)
    echo: Callable[[str], None] = print
    trials: list[dict[str, Any]] = field(init=False, default_factory=list)
    n_trials: int = field(init=False, default=0)

    def __post_init__(self):
        if self.n_jobs < 1 or self.threads < 1:
            raise UserError(f"jobs {self.n_jobs} and threads {self.threads} must both be 1 or more")
        found = undeclared(self.plan)
        for line in found:
            self.echo(f"arms differ in {line}")
        if found and not self.plan.allow_differences:
            raise UserError(f"arms differ in what they do not declare: {'; '.join(found)}; allow it explicitly")
        if len(self.text.held_out) < 2:
            raise UserError(
                f"{self.text.source}: {len(self.text.held_out)} held-out document is too few for an interval; "
                "give more files, so that two or more are held out"
            )

    def seed_folder(self, seed: int) -> Path:
        """Where a seed's runs are: the output folder itself where there is one seed."""
        return self.out if len(self.plan.seeds) == 1 else self.out / f"seed-{seed}"

    def run(self) -> dict[str, Any]:
        """Does what is missing of the plan.

        Returns:
            The summary, which is also in summary.json.

        Raises:
            KeyboardInterrupt: after Ctrl-C or SIGTERM; summary.json then holds what there is.
            UserError: if the folder holds another comparison, or a run cannot go on.
        """
        self._write_plan()
        self._describe()
        if self.n_jobs == 1:
            torch.set_num_threads(self.threads)
        tuned = self.plan
        try:
            if self.plan.sweeps:
                tuned, self.trials = tune(self.plan, self._run_trials)
                for row in self.trials:
                    self.echo(_describe_trial(row))
            seconds = self._step_seconds(tuned) if tuned.match == "time" else None
            configs = matched_configs(tuned, seconds)
            self._execute([self._job(f"seed {s}", self.seed_folder(s), configs, s) for s in self.plan.seeds])
        except KeyboardInterrupt:
            self._write_summary(tuned, interrupted=True)
            raise
        return self._write_summary(tuned)

    def _write_plan(self) -> None:
        path, plan = self.out / PLAN_FILE, json.loads(json.dumps(self.plan.to_dict()))
        if path.exists():
            stored = json.loads(path.read_text(encoding="utf-8"))
            changed = [name for name in plan if stored.get(name) != plan[name]]
            if changed:
                raise UserError(f"{self.out} holds another comparison: it differs in {', '.join(changed)}")
        write_atomically(path, (json.dumps(plan, indent=2) + "\n").encode())

    def _describe(self) -> None:
        tokens = self.text.tokens
        self.echo(
            f"text: {self.text.source}, {tokens.n_documents:,} documents, {tokens.n_tokens:,} tokens, "
            f"hash {tokens.content_hash[:12]}"
        )
        facts = describe_environment(self.device, self.dtype)
        self.echo(f"device: {self.device}, products in {facts['dtype']}, residual backend {facts['backend']}")

    def _job(self, label: str, folder: Path, configs: Mapping[str, RunConfig], seed: int, trial: bool = False) -> Job:
        arms = {arm: config.replace(seed=seed) for arm, config in configs.items()}
        dtype = str(self.dtype).removeprefix("torch.")
        return Job(label, folder, arms, str(self.device), dtype, self.plan.sequential, trial)

    def _execute(self, jobs: Sequence[Job]) -> None:
        waiting = [job for job in jobs if job.missing()]
        if len(waiting) < len(jobs):
            self.echo(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are there already")
        if self.n_jobs > 1:
            run_in_processes(waiting, self.n_jobs, self.threads, self.echo)
            return
        for job in waiting:
            run_job(job, self.text, self.echo, describe=job is waiting[0])

    def _run_trials(self, configs: Sequence[RunConfig]) -> dict[RunConfig, TrialScore]:
        folder = self.out / TRIALS_FOLDER
        jobs = {}
        for config in configs:
            number = self.n_trials + len(jobs) + 1
            label = f"trial {number}"
            jobs[config] = self._job(label, folder / f"{number:03d}", {"arm": config}, config.seed, trial=True)
        self.n_trials += len(jobs)
        self._execute(list(jobs.values()))
        scores = {}
        for config, job in jobs.items():
            result = read_result(job.folder, "arm")
            assert result is not None
            scores[config] = TrialScore(result["bits_per_byte"], result["diverged"])
        return scores

    def _step_seconds(self, plan: Plan) -> dict[str, float]:
        """Median seconds of a step of each arm, measured interleaved once and kept."""
        path = self.out / STEP_SECONDS_FILE
        if not path.exists():
            configs = {arm: config.replace(seed=plan.seeds[0]) for arm, config in plan.arms.items()}
            measured = measure_step_seconds(configs, self.text, self.device, self.dtype)
            write_atomically(path, json.dumps(measured).encode())
        seconds = json.loads(path.read_text(encoding="utf-8"))
        self.echo("step times: " + ", ".join(f"{arm} {1000 * value:.0f} ms" for arm, value in seconds.items()))
        return seconds

    def results(self) -> dict[tuple[str, int], dict[str, Any]]:
        """What there is of each arm and seed."""
        found = {(arm, s): read_result(self.seed_folder(s), arm) for s in self.plan.seeds for arm in self.plan.arms}
        return {key: result for key, result in found.items() if result is not None}

    def _write_summary(self, tuned: Plan, interrupted: bool = False) -> dict[str, Any]:
        sweep = None
        if self.trials:
            sweep = {"seed": tuned.seeds[0], "flops": trial_flops(self.plan), "trials": self.trials}
        environment = describe_environment(self.device, self.dtype) | {"threads": self.threads, "jobs": self.n_jobs}
        summary = summarize(tuned, self.results(), _text_facts(self.text), environment, sweep, interrupted)
        write_atomically(self.out / SUMMARY_FILE, (json.dumps(summary, indent=2) + "\n").encode())
        return summary


def measure_step_seconds(
    configs: Mapping[str, RunConfig], text: RunText, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """Median seconds of an optimizer step of each arm, interleaved, with models that are then thrown away."""
    n_steps = WARM_UP_STEPS + TIMED_STEPS
    trainers = {}
    for arm, config in configs.items():
        config = config.replace(steps=n_steps)
        trainers[arm] = Trainer(arm, config, config.model, text.loader(config, World()), device, dtype)
        trainers[arm].prepare()
    for _ in range(n_steps):
        for trainer in trainers.values():
            trainer.step()
    torch.compiler.reset()
    return {arm: statistics.median(trainer.step_seconds[WARM_UP_STEPS:]) for arm, trainer in trainers.items()}


def _text_facts(text: RunText) -> dict[str, Any]:
    return {
        "source": text.source,
        "hash": text.tokens.content_hash,
        "documents": text.tokens.n_documents,
        "tokens": text.tokens.n_tokens,
        "tokenizer_hash": text.tokenizer.content_hash,
    }


def _describe_trial(row: Mapping[str, Any]) -> str:
    score = "diverged" if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.4f} bits per byte"
    chosen = ", chosen" if row["chosen"] else ""
    edge = " (at the edge of the values tried)" if row["at_edge"] else ""
    return f"trial: {row['arm']} {row['key']}={row['value']}: {score}{chosen}{edge}"
