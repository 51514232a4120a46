"""What a comparison will do, before it does any of it: arms, seeds, matching, sweeps, and what arms may differ in."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from nagnet.errors import UserError
from nagnet.training.arms import build_arm, declared, undeclared_differences
from nagnet.training.budget import resolve_budget
from nagnet.training.config import BUDGETS, MAX_SEED, RunConfig
from nagnet.training.overrides import from_plain, override

Match = Literal["flops", "tokens", "time"]
USUAL_BASELINE = "pre_norm"
READ_TOGETHER = ("data", "eval_bytes", "seq_len", "model.vocab_size")  # one text is opened for all arms
_LABEL = re.compile(r"[A-Za-z0-9][\w.+-]*")


@dataclass(frozen=True)
class Sweep:
    """Values to try for one field.

    Attributes:
        arm: whose field, or None for every arm's. key: the field, with dots. values: as text, at least one.
    """

    arm: str | None
    key: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Sweep:
        """Reads ``ARM:KEY=V1,V2`` or ``KEY=V1,V2``.

        Raises:
            UserError: for other text, or a value given twice.
        """
        target, _, listed = text.partition("=")
        arm, colon, key = target.rpartition(":")
        values = tuple(value.strip() for value in listed.split(",") if value.strip())
        if not key or not values or (colon and not arm):
            raise UserError(f"sweep {text!r}: write KEY=V1,V2 or ARM:KEY=V1,V2")
        if len(set(values)) < len(values):
            raise UserError(f"sweep {text!r} has a value twice; each is one trial")
        return cls(arm.strip() or None, key.strip(), values)


@dataclass(frozen=True)
class Plan:
    """A comparison, complete enough to be run again from this alone.

    Attributes:
        recipe: name of the recipe. config: the recipe with the changes that hold for every arm.
        arms: label -> run config. kinds: label -> named arm (`nagnet.training.arms`) it was made from.
        baseline: label of the arm from which the others are told apart.
        seeds: of initial parameters and batch order; each trains every arm.
        match: what the arms of a pair share: training FLOPs, tokens, or measured compute time. The baseline's budget
            sets the amount.
        sweeps: tuning before the first comparison. sweep_budget: training FLOPs of a trial; None: the whole budget.
        sequential: train the arms of a seed one after another; else interleaved.
        allow_differences: run although arms differ in undeclared fields, or had unequal numbers of trials.
    """

    recipe: str
    config: RunConfig
    arms: dict[str, RunConfig]
    kinds: dict[str, str]
    baseline: str
    seeds: tuple[int, ...]
    match: Match = "flops"
    sweeps: tuple[Sweep, ...] = ()
    sweep_budget: float | None = None
    sequential: bool = False
    allow_differences: bool = False

    def __post_init__(self):
        if self.match not in get_args(Match):
            raise UserError(f"match is {self.match!r}; choose {', '.join(get_args(Match))}")
        if len(self.arms) < 2:
            raise UserError(f"arms {', '.join(self.arms) or '(none)'}: name two or more different ones")
        if self.baseline not in self.arms:
            raise UserError(f"baseline {self.baseline!r} is none of the arms {', '.join(self.arms)}")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise UserError(f"seeds are {self.seeds}; give one or more different ones")
        if self.sweep_budget is not None and not self.sweep_budget > 0:
            raise UserError(f"sweep budget is {self.sweep_budget}; give training FLOPs above 0")
        self._check_sweeps()
        self._check_text()

    def _check_sweeps(self) -> None:
        for sweep in self.sweeps:
            if sweep.arm is not None and sweep.arm not in self.arms:
                raise UserError(f"sweep of {sweep.key}: {sweep.arm!r} is none of the arms {', '.join(self.arms)}")
            for arm in self.arms if sweep.arm is None else [sweep.arm]:
                for value in sweep.values:
                    override(self.arms[arm], [f"{sweep.key}={value}"])
        trials = {arm: sum(len(sweep.values) for sweep in self.sweeps_of(arm)) for arm in self.arms}
        if len(set(trials.values())) > 1 and not self.allow_differences:
            counts = ", ".join(f"{arm} {count}" for arm, count in trials.items())
            raise UserError(f"arms have unequal numbers of trials ({counts}); give each as many or allow it explicitly")

    def _check_text(self) -> None:
        base = flat_config(self.arms[self.baseline])
        for arm, config in self.arms.items():
            for key in READ_TOGETHER:
                if flat_config(config)[key] != base[key]:
                    raise UserError(f"{arm} has another {key} than {self.baseline}; arms read and score the same text")

    def sweeps_of(self, arm: str) -> list[Sweep]:
        """The sweeps that tune an arm, in order."""
        return [sweep for sweep in self.sweeps if sweep.arm in (None, arm)]

    def others(self) -> list[str]:
        """Every arm but the baseline, in order."""
        return [arm for arm in self.arms if arm != self.baseline]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `from_dict` takes them back."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values["config"] = self.config.to_dict()
        values["arms"] = {arm: config.to_dict() for arm, config in self.arms.items()}
        values["sweeps"] = [vars(sweep) | {"values": list(sweep.values)} for sweep in self.sweeps]
        return values | {"seeds": list(self.seeds)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """Builds a plan from plain values.

        Raises:
            UserError: if they are no plan.
        """
        values = dict(values)
        values["config"] = RunConfig.from_dict(values["config"])
        values["arms"] = {arm: RunConfig.from_dict(config) for arm, config in values["arms"].items()}
        values["sweeps"] = tuple(Sweep(s["arm"], s["key"], tuple(s["values"])) for s in values["sweeps"])
        values["seeds"] = tuple(values["seeds"])
        return from_plain(cls, values, "plan")


def parse_arms(text: str) -> dict[str, str]:
    """Reads ``KIND,LABEL=KIND,...`` into label -> kind; without a label the kind is its own.

    Raises:
        UserError: for a label twice, or one that cannot name a folder.
    """
    arms: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        label, equals, kind = (word.strip() for word in part.partition("="))
        if not _LABEL.fullmatch(label):
            raise UserError(f"arm {part!r}: a label has letters, digits, dots, dashes and underscores")
        if label in arms:
            raise UserError(f"arm {label!r} is named twice; give one of them a label of its own: LABEL={label}")
        arms[label] = kind if equals else label
    return arms


def make_plan(
    recipe: str,
    config: RunConfig,
    kinds: Mapping[str, str],
    changes: Sequence[str] = (),
    baseline: str | None = None,
    n_seeds: int = 1,
    **options: Any,
) -> Plan:
    """Builds the arms and checks the plan.

    Args:
        config: the recipe with what holds for every arm; its seed is the first.
        kinds: label -> named arm.
        changes: ``ARM:KEY=VALUE`` for single arms.
        baseline: label; by default the pre-norm arm where there is one, else the first.
        options: the other fields of `Plan`.

    Raises:
        UserError: for anything that cannot be run.
    """
    if n_seeds < 1 or config.seed + n_seeds > MAX_SEED:
        raise UserError(f"seeds {n_seeds} from {config.seed} on: give 1 or more, below 2^63")
    arms = {label: build_arm(config, kind) for label, kind in kinds.items()}
    for change in changes:
        arm, colon, assignment = change.partition(":")
        if not colon or arm not in arms:
            raise UserError(f"change {change!r}: write ARM:KEY=VALUE with one of the arms {', '.join(arms)}")
        arms[arm] = override(arms[arm], [assignment])
    if baseline is None:
        baseline = next((arm for arm, kind in kinds.items() if kind == USUAL_BASELINE), next(iter(arms), ""))
    seeds = tuple(range(config.seed, config.seed + n_seeds))
    return Plan(recipe, config, arms, dict(kinds), baseline, seeds, **options)


def differences(plan: Plan, arm: str) -> list[tuple[str, Any, Any]]:
    """Fields in which an arm is not its baseline: name, the arm's value, the baseline's; budget and seed left out."""
    ours, theirs = (flat_config(plan.arms[name]) for name in (arm, plan.baseline))
    ignored = ("seed", *BUDGETS)
    return [(key, ours[key], theirs[key]) for key in ours if ours[key] != theirs[key] and key not in ignored]


def undeclared(plan: Plan) -> list[str]:
    """A line for each field in which arms differ although neither their names nor a sweep declare it."""
    allowed = {field for kind in plan.kinds.values() for field in declared(kind)}
    allowed |= {sweep.key for sweep in plan.sweeps} | set(BUDGETS)
    return undeclared_differences(plan.arms, allowed)


def flat_config(config: RunConfig) -> dict[str, Any]:
    """Dotted field -> value."""

    def flatten(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for key, value in values.items():
            flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
        return flat

    return flatten(config.to_dict(), "")


def matched_configs(plan: Plan, step_seconds: Mapping[str, float] | None = None) -> dict[str, RunConfig]:
    """The arms with budgets that match the baseline's.

    Args:
        step_seconds: measured seconds of a step of each arm, for a plan that matches time.
    """
    base = resolve_budget(plan.arms[plan.baseline])
    if plan.match == "flops":
        flops = plan.arms[plan.baseline].flops or base.flops
        return {arm: config.replace(flops=flops) for arm, config in plan.arms.items()}
    if plan.match == "tokens":
        return {arm: config.replace(tokens=base.tokens) for arm, config in plan.arms.items()}
    assert step_seconds is not None
    ratios = {arm: step_seconds[plan.baseline] / step_seconds[arm] for arm in plan.arms}
    return {arm: config.replace(steps=max(1, round(base.n_steps * ratios[arm]))) for arm, config in plan.arms.items()}
