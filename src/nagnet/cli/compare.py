"""Train arms on the same batches for the same FLOPs, over seeds, and report the paired differences.

nagnet compare ladder-5 optimizer.gate_lr=0.002 --arms pre_norm,norm_agnostic --seeds 3 --budget 2e12 --jobs 2

KEY=VALUE changes a field of the recipe for every arm; --change ARM:KEY=VALUE for one, which is refused without
--allow-differences. An arm may have a label: --arms pre_norm,low=norm_agnostic,high=norm_agnostic. After a stop the
same command with --resume does what is missing. docs/protocol.md says what the numbers mean.

Writes to a new folder: report.html, summary.json, plan.json, figures/, and for each seed (in seed-N/ where there are
several) metrics.jsonl, tokenizer.json and each arm's model and result.json.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from nagnet.cli.device import DeviceName, resolve_device
from nagnet.cli.output_folder import check_output_folder, claim_output_folder
from nagnet.cli.train import recipe_config
from nagnet.errors import UserError


@dataclass
class CommonOptions:
    """Options that demo and compare share."""

    data: str | None = None
    """A prepared folder (nagnet data prepare), or a file or folder of text; default: the recipe's."""
    out: Path | None = None
    """New folder for the results; default: runs/RECIPE-DATE-TIME."""
    seed: int = 0
    """Seed of initial parameters, batch order and samples."""
    budget: float | None = None
    """Training FLOPs of each arm, such as 1e12; default: the recipe's."""
    device: DeviceName = "auto"
    """Where to compute."""
    eager: bool = False
    """Do not compile: starts sooner, trains slower."""
    force: bool = False
    """Delete an earlier run in the output folder first."""
    json: bool = False
    """Print summary.json on standard output instead of the table."""


@dataclass
class Options(CommonOptions):
    """What to compare."""

    recipe: Annotated[str, tyro.conf.Positional] = "stdlib-tiny"
    """Name of a recipe; see nagnet recipes."""
    changes: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Fields of the recipe to change for every arm, as KEY=VALUE."""
    arms: str = "norm_agnostic,pre_norm"
    """Arms by name, separated by commas, each as NAME or LABEL=NAME; see --list-arms."""
    list_arms: bool = False
    """Only print the names of arms, with a line on each."""
    baseline: str | None = None
    """Arm that the others are compared with; default: pre_norm, or the first."""
    change: tuple[str, ...] = ()
    """Fields to change for one arm, as ARM:KEY=VALUE."""
    seeds: int = 1
    """How many seeds, counted from --seed."""
    match: Literal["flops", "tokens", "time"] = "flops"
    """What arms share with the baseline: training FLOPs, tokens, or measured seconds of training steps."""
    sweep: tuple[str, ...] = ()
    """Values to try first on the first seed, as KEY=V1,V2 for every arm or ARM:KEY=V1,V2 for one."""
    sweep_budget: float | None = None
    """Training FLOPs of each trial; default: the whole budget."""
    allow_differences: bool = False
    """Run although arms differ in undeclared fields or had unequal numbers of trials."""
    sequential: bool = False
    """Train the arms of a seed one after another; step times are then not comparable."""
    jobs: int = 1
    """Seeds (and trials) at a time, each in a process of its own where more than 1."""
    threads: int | None = None
    """Threads of each job; default: torch's number divided by --jobs."""
    resume: bool = False
    """Go on in --out: do what is missing. Training that was not finished starts again."""
    record: Path | None = None
    """Also write a record, a folder such as records/0003-readout."""
    question: str | None = None
    """The record's question; needed for a new one."""
    success_rule: str | None = None
    """What result would answer it; needed for a new one."""
    rerun: Path | None = None
    """Run the plan of this record again, whatever the recipes have become."""
    index: Path | None = None
    """Only write INDEX.md of this folder of records."""


# Do not say what is compared; all others must be left out where a record says it.
HOW_TO_RUN = ("out", "device", "force", "json", "jobs", "threads", "resume", "record", "rerun", "index")


def main(options: Options) -> int:
    """Runs the comparison."""
    if options.list_arms:
        from nagnet.training.arms import describe

        for name, line in describe().items():
            print(f"{name}: {line}")
        return 0
    if options.index is not None:
        from nagnet.training.records import write_index

        print(write_index(options.index))
        return 0
    if options.resume and options.out is None:
        raise UserError("--resume needs --out, the folder of the comparison to go on with")
    recorded = None
    if options.rerun is None:
        plan = plan_of(options)
    else:
        plan, recorded = _recorded(options)
    return run(options, plan, recorded)


def plan_of(options: Options) -> Any:
    """The plan that the options describe."""
    from nagnet.training.plan import Sweep, make_plan, parse_arms

    return make_plan(
        options.recipe,
        _config(options, options.recipe, options.changes),
        parse_arms(options.arms),
        options.change,
        options.baseline,
        options.seeds,
        match=options.match,
        sweeps=tuple(Sweep.parse(text) for text in options.sweep),
        sweep_budget=options.sweep_budget,
        sequential=options.sequential,
        allow_differences=options.allow_differences,
    )


def _config(options: CommonOptions, recipe: str, changes: tuple[str, ...] = ()) -> Any:
    config = recipe_config(recipe, changes, options.data)
    own = {"seed": options.seed} if options.seed else {}
    own |= {"compile": False} if options.eager else {}
    return config.replace(**own) if options.budget is None else config.replace(flops=options.budget, **own)


def demo_plan(options: CommonOptions) -> Any:
    """The plan of the demo."""
    from nagnet.training.plan import make_plan, parse_arms

    recipe = "stdlib-tiny"
    return make_plan(recipe, _config(options, recipe), parse_arms(Options.arms))


def _recorded(options: Options) -> tuple[Any, Any]:
    """Plan and differences of the record to run again."""
    from nagnet.training.plan import Plan
    from nagnet.training.records import SUMMARY_FILE, read_protocol

    assert options.rerun is not None
    changed = [field.name for field in _given(options) if field.name not in HOW_TO_RUN]
    if changed:
        raise UserError(f"--rerun runs what the record says; leave out {', '.join(changed)}")
    plan = Plan.from_dict(read_protocol(options.rerun)["plan"])
    summary = options.rerun / SUMMARY_FILE
    return plan, json.loads(summary.read_text(encoding="utf-8"))["differences"] if summary.exists() else []


def _given(options: Options) -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(options) if getattr(options, field.name) != field.default]


def command_line(options: Options) -> str:
    """The command that makes a record, as a shell takes it."""
    if options.rerun is not None:
        return f"nagnet compare --rerun {shlex.quote(str(options.rerun))} --record {shlex.quote(str(options.record))}"
    words = ["nagnet", "compare", options.recipe, *options.changes]
    for field in _given(options):
        value = getattr(options, field.name)
        if field.name in ("recipe", "changes", "out", "force", "json", "resume"):
            continue
        words.append(f"--{field.name.replace('_', '-')}")
        parts = value if isinstance(value, tuple) else () if value is True else (value,)
        words += [f"{part:.10g}" if isinstance(part, float) else str(part) for part in parts]
    return shlex.join(words)


def run(options: CommonOptions, plan: Any, recorded: Any = None) -> int:
    """Trains, evaluates and reports.

    Args:
        recorded: differences of the record that is run again, to be shown beside the new ones.

    Returns:
        Exit code: 0, or 130 where Ctrl-C ended training early.
    """
    import torch

    from nagnet.training.compute import resolve_dtype
    from nagnet.training.experiment import PLAN_FILE, Experiment
    from nagnet.training.text import open_text

    how = options if isinstance(options, Options) else Options()
    out = options.out or Path("runs") / f"{plan.recipe}-{datetime.now():%Y%m%d-%H%M%S}"
    goes_on = how.resume and (out / PLAN_FILE).exists()
    if not goes_on:
        check_output_folder(out, options.force)
    device = resolve_device(options.device)
    config = plan.config
    experiment = Experiment(
        plan,
        open_text(config.data, config.model.vocab_size, config.eval_bytes),
        out,
        device,
        resolve_dtype(config.dtype, device),
        how.jobs,
        how.threads or max(1, torch.get_num_threads() // max(1, how.jobs)),
        _quiet if options.json else _say,
    )
    if how.record is not None:
        from nagnet.training.records import begin_record

        begin_record(how.record, how.question, how.success_rule, plan, command_line(how))
    if not goes_on:
        claim_output_folder(out, options.force)
    try:
        _finish(experiment, experiment.run(), how, options.json, recorded)
    except KeyboardInterrupt:
        _say_where(experiment, isinstance(options, Options))
        return 130
    return 0


def _finish(experiment: Any, summary: Any, how: Options, as_json: bool, recorded: Any) -> None:
    from nagnet.cli.comparison_table import print_table
    from nagnet.training.comparison_report import write_comparison_report
    from nagnet.training.comparison_summary import describe_difference

    report = write_comparison_report(
        experiment.out, summary, experiment.text, experiment.seed_folder, experiment.device
    )
    if how.record is not None:
        from nagnet.training.records import finish_record

        finish_record(how.record, experiment.out, summary, experiment.seed_folder)
    if as_json:
        print(json.dumps(summary, indent=2))
        return
    print_table(summary)
    for row in recorded or ():
        print(f"recorded: {describe_difference(row)}")
    print(f"report: {report}" + ("" if how.record is None else f", record: {how.record / 'README.md'}"))


def _say_where(experiment: Any, can_resume: bool) -> None:
    done = ", ".join(
        f"{arm} {result['steps']} steps" + ("" if len(experiment.plan.seeds) == 1 else f" of seed {seed}")
        for (arm, seed), result in experiment.results().items()
    )
    where = f"models, tokenizer, metrics and summary.json are in {experiment.out}, without a report"
    goes_on = "; the same command with --resume goes on" if can_resume else ""
    print(f"nagnet: interrupted after {done or 'no step'}; {where}{goes_on}", file=sys.stderr)


def _say(line: str) -> None:
    print(line, flush=True)


def _quiet(line: str) -> None:
    """With --json, standard output holds the JSON alone."""
