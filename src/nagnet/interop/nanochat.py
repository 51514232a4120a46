"""Checkpoints of AlxSp/nag-nanochat, the public walkthrough's code, as models of this package.

A checkpoint is ``model_STEP.pt`` (named tensors) and ``meta_STEP.json``. Its two architectures are configs here:

    gpt       pre-norm, embeddings brought to RMS 1, free readout rows under a tanh cap of 15
    nag-gpt   norm-agnostic, readout rows of RMS 1 times exp(s)

One thing is not the same: there the norm lane grows by log(1 + gain^2) / 2 whatever the branch is, here by
log(1 + gain^2 p / (p + 1.2e-7)) / 2 with p the branch's mean square, so that a branch of zeros changes nothing. For a
branch of RMS 0.1 that is 1 part in 80,000; both turn the direction alike.
"""

from __future__ import annotations

import json
import math
import pickle
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nagnet.errors import UserError
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.nn.readout import CONFIDENCE_READOUT, SOFTCAP_READOUT
from nagnet.ops import reference

RESIDUALS = {"gpt": "pre_norm", "nag-gpt": "norm_agnostic"}
ROPE_BASE = 100_000.0
QK_GAIN = 1.2
BRANCH_EPS = reference.RMS_EPS  # torch's rms_norm without an eps, float32
MODULATION_FLOOR = 1e-6
SHORT_WINDOW_STEP = 128  # short windows are a quarter of the sequence, rounded up to a multiple of it
REQUIRED_FIELDS = ("sequence_len", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd")
WINDOW_FIELD = "window_pattern"  # older checkpoints have none and see everything

_COMPILED_PREFIX = "_orig_mod."
_MODEL_FILE = re.compile(r"model_(\d+)\.pt")
_EMBEDDING, _READOUT = "transformer.wte.weight", "lm_head.weight"
_SUBLAYERS = {
    "attn.c_q.weight": "attention.q_proj.weight",
    "attn.c_k.weight": "attention.k_proj.weight",
    "attn.c_v.weight": "attention.v_proj.weight",
    "attn.c_proj.weight": "attention.out_proj.weight",
    "mlp.c_fc.weight": "mlp.up_proj.weight",
    "mlp.c_proj.weight": "mlp.out_proj.weight",
}
_BRANCHES = {
    "m_down.weight": "modulator.weight",
    "m_down.bias": "modulator.bias",
    "coef": "modulator.mixture",
    "beta": "modulator.raw_beta",
    "alpha": "alpha",
}


@dataclass(frozen=True)
class ImportedModel:
    """A model that was imported.

    Attributes:
        model: with the checkpoint's weights in float32, to the bit.
        arch: ``gpt`` or ``nag-gpt``. step: of training.
        source: the file of the weights. meta: content of the JSON beside it.
    """

    model: Decoder
    arch: str
    step: int
    source: Path
    meta: dict[str, Any]


def import_nanochat(folder: str | Path, step: int | None = None) -> ImportedModel:
    """Reads a checkpoint. No code in it ever runs, whatever the file holds.

    Rows of embedding and readout beyond the vocabulary (padding) are left out; nothing is centred or normalised.

    Args:
        folder: with ``model_STEP.pt`` and ``meta_STEP.json``.
        step: which; default: the last.

    Raises:
        UserError: if a file is missing or damaged, holds anything but tensors, or lacks some of its architecture.
    """
    weights_file, step = _find(Path(folder), step)
    meta_file = weights_file.with_name(weights_file.name.replace("model_", "meta_").replace(".pt", ".json"))
    meta = _read_meta(meta_file)
    arch, shape = _described(meta, meta_file)
    tensors = _read_tensors(weights_file)
    names = _names(arch, tensors, shape["n_layer"], weights_file)
    config = _config(arch, shape, tensors)
    with torch.device("meta"):  # no memory for a shape that the weights do not have
        wanted = Decoder(config).state_dict()
    renamed = _renamed(tensors, names, config.vocab_size, wanted, weights_file)
    model = Decoder(config, seed=0)
    model.load_state_dict(model.state_dict() | renamed)
    return ImportedModel(model, arch, step, weights_file, meta)


def _find(folder: Path, step: int | None) -> tuple[Path, int]:
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; name one that holds model_STEP.pt and meta_STEP.json")
    found = {int(match[1]): path for path in folder.iterdir() if (match := _MODEL_FILE.fullmatch(path.name))}
    if not found:
        raise UserError(f"{folder} holds no model_STEP.pt; name a folder of nanochat checkpoints")
    if step is not None and step not in found:
        raise UserError(f"{folder} holds no checkpoint of step {step}; it has {', '.join(map(str, sorted(found)))}")
    step = max(found) if step is None else step
    return found[step], step


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing; it says what the weights beside it are") from error
    except (ValueError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged ({error}); copy the checkpoint again") from error
    if not isinstance(meta, dict):
        raise UserError(f"{path} is damaged: it holds no object; copy the checkpoint again")
    return meta


def _described(meta: Mapping[str, Any], path: Path) -> tuple[str, dict[str, Any]]:
    """Architecture and shape, checked."""
    user, shape = meta.get("user_config"), meta.get("model_config")
    arch = user.get("arch") if isinstance(user, dict) else None
    if arch not in RESIDUALS:
        raise UserError(f"{path}: user_config.arch is {arch!r}; known architectures are {', '.join(RESIDUALS)}")
    if not isinstance(shape, dict):
        raise UserError(f"{path} has no model_config; copy the checkpoint again")
    for name in REQUIRED_FIELDS:
        value = shape.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{path}: model_config.{name} is {value!r}; it must be a whole number, 1 or more")
    unknown = sorted(set(shape) - {*REQUIRED_FIELDS, WINDOW_FIELD})
    if unknown:
        raise UserError(f"{path}: model_config has {', '.join(unknown)}, which {arch} of this import does not know")
    pattern = shape.get(WINDOW_FIELD, "L")
    if not isinstance(pattern, str) or not pattern or set(pattern.upper()) - set("SL"):
        raise UserError(f"{path}: model_config.{WINDOW_FIELD} is {pattern!r}; it must consist of S and L")
    return arch, shape


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """The named tensors of a file, read by torch's unpickler of tensors alone."""
    remedy = "copy the checkpoint again, from a source you trust"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch comments on pickles that it then refuses
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{path} is refused: it holds more than tensors, or is damaged ({reason}); {remedy}") from error
    except (PermissionError, MemoryError):
        raise
    except Exception as error:  # torch lets whatever its readers of damaged files raise pass through
        reason = f"{type(error).__name__} {error}".strip().splitlines()[0]
        raise UserError(f"{path} is damaged ({reason}); {remedy}") from error
    if not isinstance(content, dict) or not content:
        raise UserError(f"{path} holds no named tensors; {remedy}")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or not value.is_floating_point():
            raise UserError(f"{path}: entry {name!r} is no tensor of weights; {remedy}")
    tensors = {name.removeprefix(_COMPILED_PREFIX): value for name, value in content.items()}
    if len(tensors) < len(content):
        raise UserError(f"{path} holds entries both with and without {_COMPILED_PREFIX}; {remedy}")
    return tensors


def _config(arch: str, shape: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ModelConfig:
    # What the code there calls a head's width always follows from n_embd; widths of MLP and gates stand in the weights.
    options: dict[str, Any] = {"readout": SOFTCAP_READOUT}
    if arch == "nag-gpt":
        options = {
            "readout": CONFIDENCE_READOUT,
            "n_directions": len(tensors["transformer.h.0.attn_branch.m_down.weight"]),
            "branch_eps": BRANCH_EPS,
            "modulation_floor": MODULATION_FLOOR,
        }
    return ModelConfig(
        residual=RESIDUALS[arch],
        d_model=shape["n_embd"],
        n_layers=shape["n_layer"],
        n_heads=shape["n_head"],
        n_kv_heads=shape["n_kv_head"],
        vocab_size=shape["vocab_size"],
        max_seq_len=shape["sequence_len"],
        d_ff=len(tensors["transformer.h.0.mlp.c_fc.weight"]),
        rope_base=ROPE_BASE,
        qk_gain=QK_GAIN,
        sliding_windows=_windows(shape.get(WINDOW_FIELD, "L"), shape["n_layer"], shape["sequence_len"]),
        **options,
    )


def _windows(pattern: str, n_layers: int, sequence_len: int) -> tuple[int, ...]:
    """Positions each layer sees, itself included; 0 for all, as the last layer always does.

    There a window counts the positions before a query. Layers marked L see ``sequence_len`` of them and here all, which
    is the same for inputs up to that length.
    """
    short = SHORT_WINDOW_STEP * math.ceil(sequence_len / 4 / SHORT_WINDOW_STEP)
    kinds = [pattern.upper()[layer % len(pattern)] for layer in range(n_layers - 1)] + ["L"]
    windows = tuple(short + 1 if kind == "S" and short < sequence_len else 0 for kind in kinds)
    return windows if any(windows) else ()


def _names(arch: str, tensors: Mapping[str, Tensor], n_layers: int, path: Path) -> dict[str, str]:
    """Their names of all entries, and ours.

    Raises:
        UserError: if an entry is missing, is a single number, or has no place.
    """
    # Not more layers than there are entries, whatever the file beside them says.
    names = _names_of(arch, min(n_layers, len(tensors)))
    for problem, found in (("lacks", names.keys() - tensors.keys()), ("has", tensors.keys() - names.keys())):
        if found:
            some = ", ".join(sorted(found)[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
            raise UserError(f"{path} {problem} {some}, so it is no checkpoint of {arch} with {n_layers} layers")
    for name in names:
        if tensors[name].dim() == 0:
            raise UserError(f"{path}: {name} is a single number; is it a checkpoint of another model?")
    return names


def _names_of(arch: str, n_layers: int) -> dict[str, str]:
    names = {_EMBEDDING: "embedding.weight", _READOUT: "readout.weight"}
    for layer in range(n_layers):
        names |= {f"transformer.h.{layer}.{there}": f"blocks.{layer}.{here}" for there, here in _SUBLAYERS.items()}
        if arch == "nag-gpt":
            for offset, branch in enumerate(("attn_branch", "mlp_branch")):
                here = f"stream.updates.{2 * layer + offset}"
                names |= {f"transformer.h.{layer}.{branch}.{k}": f"{here}.{v}" for k, v in _BRANCHES.items()}
    if arch == "nag-gpt":
        names["g_log_encode"] = "stream.log_encode_gain"
    return names


def _renamed(
    tensors: Mapping[str, Tensor], names: Mapping[str, str], vocab_size: int, wanted: Mapping[str, Tensor], path: Path
) -> dict[str, Tensor]:
    """The tensors under our names, in float32 and our shapes, without rows beyond the vocabulary.

    Raises:
        UserError: if one has another shape.
    """
    renamed = {}
    for there, here in names.items():
        tensor, shape = tensors[there], wanted[here].shape
        if there in (_EMBEDDING, _READOUT) and tensor.dim() == 2:
            tensor = tensor[:vocab_size]
        if tensor.shape != shape and not (shape == () and tensor.shape == (1,)):
            raise UserError(f"{path}: {there} is {list(tensor.shape)}, but its meta file says {list(shape)}")
        renamed[here] = tensor.reshape(shape).float()
    return renamed
