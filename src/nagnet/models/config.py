"""Configuration of a decoder."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from nagnet.errors import UserError
from nagnet.nn.mlp import MLPS
from nagnet.nn.norm_agnostic import COMPONENTS, check_components
from nagnet.nn.readout import ReadoutConfig
from nagnet.nn.residual import RESIDUAL_STREAMS
from nagnet.nn.skip import SkipPolicy

DERIVED: Any = None  # the value of a field follows from others
PROJECTION_INITS = ("zero", "uniform", "orthogonal")
WIDTH_STEP = 8  # tapered widths differ from d_ff by multiples of it, which matrix units want


@dataclass(frozen=True)
class ModelConfig:
    """Shape and rules of a `Decoder`. Two arms of a comparison differ in ``residual`` (and ``readout``) alone.

    Attributes:
        residual: name of a rule in `nagnet.nn.residual.RESIDUAL_STREAMS`.
        d_model: width of the stream. n_layers: blocks (two updates each). n_heads: query heads.
        vocab_size: tokens. max_seq_len: positions prepared; longer inputs extend the rotary table.
        n_kv_heads: key/value heads, dividing n_heads (default n_heads). head_dim: default d_model / n_heads.
        d_ff: hidden width of the MLP (default 4 d_model). mlp: ``relu_squared`` or ``swiglu``.
        mlp_taper: t of ``d_ff (1 + t cos(pi k / (n_layers - 1)))``, the hidden width in block k from 0, which keeps
            the total (arXiv 2606.23670 has 0.5); 0: all blocks have d_ff.
        rope_base: base of the rotary wavelengths. qk_gain: RMS of queries and keys.
        sliding_windows: positions seen by the layers' attention, cycled over layers, 0 for all; empty: all see all.
        tie_embeddings: the readout shares the embedding's rows.
        readout: default: unit rows x exp(s) for norm_agnostic, unit rows x a number per entry for ngpt, free rows
            under a softcap of 15 for the others.
        projection_init: output projections of sublayers start at ``zero``, ``uniform`` with standard deviation
            1/sqrt(fan-in), or ``orthogonal``; default: zero, but uniform for a rule that wants branches from the start.
        channel_scales: queries, keys and the MLP's hidden channels have learned scales (default: with ngpt alone).
        n_directions, branch_eps, init_exponent, init_encode_gain, modulation_floor: of the norm-agnostic rule; see
            `nagnet.NormAgnosticResidual` and docs/mathematics.md. Without effect for the other rules.
        without: components of the norm-agnostic rule to leave out (`nagnet.nn.norm_agnostic.COMPONENTS`).
        skip: which tokens skip which sublayers, for norm_agnostic; every sublayer then has a vector X.
    """

    residual: str = "norm_agnostic"
    d_model: int = 256
    n_layers: int = 8
    n_heads: int = 4
    vocab_size: int = 2048
    max_seq_len: int = 1024
    n_kv_heads: int = DERIVED
    head_dim: int = DERIVED
    d_ff: int = DERIVED
    mlp: str = "relu_squared"
    mlp_taper: float = 0.0
    rope_base: float = 100_000.0
    qk_gain: float = 1.2
    sliding_windows: tuple[int, ...] = ()
    tie_embeddings: bool = False
    readout: ReadoutConfig = DERIVED
    projection_init: Literal["zero", "uniform", "orthogonal"] = DERIVED
    channel_scales: bool = DERIVED
    n_directions: int = 32
    branch_eps: float = 1e-6
    init_exponent: float = 0.5
    init_encode_gain: float = 1.0
    modulation_floor: float = 1e-6
    without: tuple[str, ...] = ()
    skip: SkipPolicy = SkipPolicy()

    def __post_init__(self):
        if self.residual not in RESIDUAL_STREAMS:
            raise UserError(f"residual rule {self.residual!r}: choose one of {', '.join(RESIDUAL_STREAMS)}")
        if self.mlp not in MLPS:
            raise UserError(f"mlp {self.mlp!r}: choose one of {', '.join(MLPS)}")
        for name in ("d_model", "n_layers", "n_heads", "vocab_size", "max_seq_len", "n_directions"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UserError(f"{name} is {value!r}; it must be a whole number, 1 or more")
        if not isinstance(self.readout, ReadoutConfig | None):
            raise UserError(f"readout is {self.readout!r}; give a ReadoutConfig, or leave it out")
        if not isinstance(self.skip, SkipPolicy):
            raise UserError(f"skip is {self.skip!r}; give a SkipPolicy, or leave it out")
        if self.skip.on and not RESIDUAL_STREAMS[self.residual].can_skip:
            raise UserError(
                f"the rule {self.residual} has no gain by which a token could skip a sublayer; take norm_agnostic, or "
                "leave skip out"
            )
        if not math.isfinite(self.init_exponent):
            raise UserError(f"init_exponent is {self.init_exponent}; it must be a finite number")
        if self.head_dim is DERIVED and self.d_model % self.n_heads:
            raise UserError(
                f"d_model {self.d_model} is not divisible by n_heads {self.n_heads}; change one or set head_dim"
            )
        for name in ("rope_base", "qk_gain", "init_encode_gain"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} is {getattr(self, name)}; it must be a positive number")
        if not 0 <= self.branch_eps < math.inf:
            raise UserError(f"branch_eps is {self.branch_eps}; it must be 0 or a positive number")
        if not 0 <= self.modulation_floor < 1:
            raise UserError(f"modulation_floor is {self.modulation_floor}; it must be 0 or more, below 1")
        check_components(self.without)
        for name, default in self._defaults().items():
            if getattr(self, name) is DERIVED:
                object.__setattr__(self, name, default)
        object.__setattr__(self, "sliding_windows", tuple(self.sliding_windows))
        object.__setattr__(self, "without", tuple(name for name in COMPONENTS if name in self.without))
        self._check_derived()

    def _check_derived(self) -> None:
        if self.d_ff < 1:
            raise UserError(f"d_ff is {self.d_ff}; it must be 1 or more")
        if not -1 < self.mlp_taper < 1:
            raise UserError(f"mlp_taper is {self.mlp_taper}; it must be above -1 and below 1")
        if self.mlp_taper and (len(set(self.mlp_widths)) == 1 or min(self.mlp_widths) < 1):
            raise UserError(
                f"mlp_taper {self.mlp_taper} cannot taper {self.n_layers} blocks of d_ff {self.d_ff} in steps of "
                f"{WIDTH_STEP}; give more blocks or a larger d_ff"
            )
        if self.head_dim % 2 or self.head_dim < 2:
            raise UserError(f"head_dim is {self.head_dim}; rotary embedding turns pairs, so it must be even")
        if self.n_kv_heads < 1 or self.n_heads % self.n_kv_heads:
            raise UserError(f"n_kv_heads {self.n_kv_heads} does not divide n_heads {self.n_heads}; choose a divisor")
        if any(window < 0 for window in self.sliding_windows):
            raise UserError(f"sliding_windows {self.sliding_windows}: give lengths of 1 or more, or 0 for all")
        if self.projection_init not in PROJECTION_INITS:
            raise UserError(f"projection_init {self.projection_init!r}: choose one of {', '.join(PROJECTION_INITS)}")
        if self.projection_init == "zero" and not RESIDUAL_STREAMS[self.residual].zero_init_projections:
            raise UserError(
                f"projection_init zero does not go with the rule {self.residual}, whose branches cannot start at zero; "
                "choose uniform or orthogonal"
            )

    def _defaults(self) -> dict[str, Any]:
        """Values of the fields that follow from others where they are left at DERIVED."""
        rule = RESIDUAL_STREAMS[self.residual]
        return {
            "n_kv_heads": self.n_heads,
            "head_dim": self.d_model // self.n_heads,
            "d_ff": 4 * self.d_model,
            "readout": rule.readout,
            "projection_init": "zero" if rule.zero_init_projections else "uniform",
            "channel_scales": rule.channel_scales,
        }

    @property
    def skip_vector(self) -> bool:
        """Whether every sublayer has a learned vector X."""
        return self.skip.on

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        """Hidden width of the MLP in each block; they sum to n_layers x d_ff."""
        last = self.n_layers - 1
        # Opposite blocks are rounded together, so that what one gains the other loses.
        first_half = [
            WIDTH_STEP * round(self.d_ff * self.mlp_taper * math.cos(math.pi * layer / last) / WIDTH_STEP)
            for layer in range(self.n_layers // 2)
        ]
        middle = [0] * (self.n_layers % 2)
        changes = [*first_half, *middle, *(-change for change in reversed(first_half))]
        return tuple(self.d_ff + change for change in changes)

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain values that `from_dict` takes back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """Builds a config from plain values.

        Raises:
            UserError: for an unknown key, naming it.
        """
        values = dict(values)
        if isinstance(values.get("readout"), dict):
            _refuse_unknown_keys(ReadoutConfig, values["readout"], "readout")
            values["readout"] = ReadoutConfig(**values["readout"])
        if isinstance(values.get("skip"), dict):
            _refuse_unknown_keys(SkipPolicy, values["skip"], "skip")
            values["skip"] = SkipPolicy(**values["skip"])
        _refuse_unknown_keys(cls, values, "model config")
        return cls(**values)

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with ``changes``. Fields that stand at their default follow the change: a new ``residual`` brings
        that rule's readout, a new ``d_model`` its ``d_ff``."""
        for name, default in self._defaults().items():
            if getattr(self, name) == default:
                changes.setdefault(name, DERIVED)
        return dataclasses.replace(self, **changes)


def _refuse_unknown_keys(cls: type, values: dict[str, Any], what: str) -> None:
    known = {field.name for field in dataclasses.fields(cls)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise UserError(f"unknown {what} keys {', '.join(unknown)}; known are {', '.join(sorted(known))}")
