"""Arms by name: what one side of a comparison changes in a recipe, and that it says so.

A name is a residual rule (``pre_norm``), a rule with another readout (``pre_norm+cosine``), the norm-agnostic rule
without one component (``norm_agnostic-orthogonal``), with tokens that skip sublayers (``mod_20``: 20% of them), or
``tapered``. A rule alone brings its default readout, unless the recipe has one of its own; ``RULE+READOUT`` names it
whatever the recipe has.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nagnet.errors import UserError
from nagnet.models.config import ModelConfig
from nagnet.nn.norm_agnostic import COMPONENTS
from nagnet.nn.readout import CONFIDENCE_READOUT, SOFTCAP_READOUT, ReadoutConfig
from nagnet.nn.residual import RESIDUAL_STREAMS
from nagnet.nn.skip import SkipPolicy
from nagnet.training.config import RunConfig

RULES = {
    "norm_agnostic": "a gated rotation of the stream's direction per sublayer",
    "pre_norm": "x + F(N(x)), the baseline",
    "post_norm": "N(x + F(x))",
    "none": "F(N(x)), no residual stream",
    "layernorm_scaling": "x + F(N(x) / sqrt(block))",
    "sandwich": "x + N(F(N(x)))",
    "ngpt": "a learned step along the sphere, unit matrices, learned scales per channel",
}
READOUTS = ("softcap", "cosine", "free", "constant")
NORM_READOUTS = ("cosine", "free")  # say nothing of a stream whose norm is the same for every token
FREE_START = 1.0  # of the learned number on free rows: their logits start near 0, so more would only train them faster
SKIPPED_PERCENT = (0, 20, 25)
TAPER = 0.5  # of arXiv 2606.23670


@dataclass(frozen=True)
class Arm:
    """One side of a comparison.

    Attributes:
        change: makes the arm's model of the recipe's.
        declared: dotted names of the fields of a run config that are its treatment, or follow from it.
        line: what it is, in one line.
    """

    change: Callable[[ModelConfig], ModelConfig]
    declared: tuple[str, ...]
    line: str


def _with_rule(model: ModelConfig, residual: str, **changes: Any) -> ModelConfig:
    """The model with a rule and its default readout, or the readout of its own that the recipe has."""
    readout = model.readout
    if readout == RESIDUAL_STREAMS[model.residual].readout:
        readout = RESIDUAL_STREAMS[residual].readout
        if readout.learns_scale:
            readout = dataclasses.replace(readout, init_scale=model.init_encode_gain)
    return model.replace(residual=residual, readout=readout, **changes)


def _readout(rule: str, name: str, start: float) -> ReadoutConfig:
    """The readout of this name, with the same temperature at the start for every rule."""
    # The norm-agnostic stream has the learned number as G_encode, in the norm lane.
    token_scale = ReadoutConfig(scale="learned_log_norm", init_scale=start)
    if rule == "norm_agnostic":
        token_scale = CONFIDENCE_READOUT
    return {
        "softcap": SOFTCAP_READOUT,
        "cosine": token_scale,
        "free": dataclasses.replace(token_scale, rows="free"),
        "constant": ReadoutConfig(scale="learned", init_scale=start),
    }[name]


def _with_readout(model: ModelConfig, rule: str, readout: str) -> ModelConfig:
    if readout == "free":
        model = model.replace(init_encode_gain=FREE_START)
    return model.replace(residual=rule, readout=_readout(rule, readout, model.init_encode_gain))


def _words(readout: ReadoutConfig) -> str:
    scale = {
        "log_norm": " x exp(s)",
        "learned": " x one learned number",
        "learned_log_norm": " x exp(s) x one learned number",
        "per_entry": " x one learned number per entry",
        "none": "",
    }[readout.scale]
    cap = "" if readout.softcap is None else f" under a tanh cap of {readout.softcap:g}"
    return f"{readout.rows} rows{scale}{cap}"


def _rule_fields(rule: str) -> tuple[str, ...]:
    """The treatment of a rule: itself, its readout, and what its sublayers need."""
    stream = RESIDUAL_STREAMS[rule]
    fields = ["model.residual", "model.readout"]
    if not stream.zero_init_projections:
        fields.append("model.projection_init")
    if stream.channel_scales:
        fields.append("model.channel_scales")
    return tuple(fields)


def _arms() -> dict[str, Arm]:
    arms = {}
    for rule, line in RULES.items():
        stream, fields = RESIDUAL_STREAMS[rule], _rule_fields(rule)
        change = functools.partial(_with_rule, residual=rule)
        arms[rule] = Arm(change, fields, f"{line}; by default {_words(stream.readout)}")
        for readout in READOUTS:
            if stream.has_norm_lane or readout not in NORM_READOUTS:
                change = functools.partial(_with_readout, rule=rule, readout=readout)
                own = ("model.init_encode_gain",) if readout == "free" else ()
                words = _words(_readout(rule, readout, FREE_START))
                arms[f"{rule}+{readout}"] = Arm(change, (*fields, *own), f"{line}; {words}")
    fields = _rule_fields("norm_agnostic")
    for percent in SKIPPED_PERCENT:
        policy = SkipPolicy(target_rate=percent / 100)
        change = functools.partial(_with_rule, residual="norm_agnostic", skip=policy)
        what = f"{percent}% of the sublayer-tokens skipped" if percent else "a vector X in every sublayer, none skipped"
        arms[f"mod_{percent}"] = Arm(change, (*fields, "model.skip"), f"norm_agnostic, with {what}")
    for component, line in COMPONENTS.items():
        change = functools.partial(_with_rule, residual="norm_agnostic", without=(component,))
        arms[f"norm_agnostic-{component}"] = Arm(change, (*fields, "model.without"), f"norm_agnostic, but {line}")
    arms["norm_agnostic-directions"] = Arm(
        functools.partial(_with_rule, residual="norm_agnostic", n_directions=1),
        (*fields, "model.n_directions"),
        "norm_agnostic, but the modulator has one direction (C = 1)",
    )
    arms["tapered"] = Arm(
        functools.partial(_with_rule, residual="pre_norm", mlp_taper=TAPER),
        (*_rule_fields("pre_norm"), "model.mlp_taper"),
        "pre_norm with wide MLPs in early blocks and narrow ones in late, same total",
    )
    return arms


ARMS: dict[str, Arm] = _arms()


def find_arm(name: str) -> Arm:
    """The arm of this name.

    Raises:
        UserError: for an unknown name, with the nearest one.
    """
    if name not in ARMS:
        nearest = difflib.get_close_matches(name, ARMS, n=1, cutoff=0.0)[0]
        raise UserError(f"unknown arm {name!r}; did you mean {nearest!r}?")
    return ARMS[name]


def build_arm(config: RunConfig, name: str) -> RunConfig:
    """The recipe as this arm runs it: another model, and all else the same.

    Raises:
        UserError: for an unknown name, or a recipe whose shape the arm cannot have.
    """
    return config.replace(model=find_arm(name).change(config.model))


def declared(name: str) -> tuple[str, ...]:
    """Dotted names of the fields that are the arm's treatment; a name stands for all below it.

    Raises:
        UserError: for an unknown arm.
    """
    return find_arm(name).declared


def describe() -> dict[str, str]:
    """One line for each arm."""
    return {name: arm.line for name, arm in ARMS.items()}


def undeclared_differences(arms: Mapping[str, RunConfig], treatment: Collection[str]) -> list[str]:
    """Lines naming each field in which the arms differ although none declares it.

    Args:
        arms: name -> what it runs.
        treatment: the dotted names that any of them declares; ``model.readout`` stands for ``model.readout.rows``.

    Returns:
        Lines such as ``model.qk_gain: norm_agnostic 1.2, pre_norm 1.0``, in the order of the config.
    """
    values = {name: dict(_leaves(config.to_dict())) for name, config in arms.items()}
    fields = dict.fromkeys(field for leaves in values.values() for field in leaves)
    return [
        f"{field}: " + ", ".join(f"{name} {leaves.get(field)}" for name, leaves in values.items())
        for field in fields
        if not any(f"{field}.".startswith(f"{name}.") for name in treatment)
        and len({json.dumps(leaves.get(field)) for leaves in values.values()}) > 1
    ]


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
