"""Models on disk: safetensors for the parameters, JSON for the config. Nothing is ever unpickled."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from nagnet.errors import UserError
from nagnet.files import write_atomically
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
_TIED = "readout.weight"  # shares the embedding's storage in a tied model; written once


def _safetensors():
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise UserError("models are stored with safetensors: pip install 'nagnet[train]'") from error
    return safetensors


def save_model(model: Decoder, folder: str | Path) -> Path:
    """Writes ``config.json`` and ``model.safetensors``, each complete or not at all.

    Args:
        model: compiled or not; parameter names are the same. folder: made if missing.

    Returns:
        The folder.
    """
    safetensors, folder = _safetensors(), Path(folder)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_embeddings:
        del tensors[_TIED]
    payload = {
        WEIGHTS_FILE: safetensors.torch.save(tensors),
        CONFIG_FILE: (json.dumps(model.config.to_dict(), indent=2) + "\n").encode(),
    }
    for name, content in payload.items():  # the config last: its presence says that the weights are complete
        write_atomically(folder / name, content)
    return folder


def load_parameters(model: Decoder, folder: str | Path) -> None:
    """Puts the parameters of a saved model into another, which may have vectors X and a threshold of its own.

    Raises:
        UserError: if a file is missing or damaged, or the models differ in more.
    """
    _put(model, _read(Path(folder))[1], Path(folder), may_miss=(".skip_vector", "skipping.threshold"))


def load_model(folder: str | Path, device: str | torch.device = "cpu") -> Decoder:
    """Reads a model that `save_model` wrote.

    Raises:
        UserError: if a file is missing or damaged, or the weights do not fit the config.
    """
    folder = Path(folder)
    config, tensors = _read(folder)
    model = Decoder(config, seed=0)
    _put(model, tensors, folder)
    return model.to(device)


def _read(folder: Path) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    safetensors = _safetensors()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise UserError(f"{folder} holds no {name}; name a folder that save_model wrote")
    try:
        values = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        tensors = safetensors.torch.load_file(folder / WEIGHTS_FILE)
    except (json.JSONDecodeError, UnicodeDecodeError, safetensors.SafetensorError) as error:
        raise UserError(f"{folder} is damaged ({error}); save the model again") from error
    try:
        return ModelConfig.from_dict(values), tensors
    except UserError:
        raise
    except (TypeError, ValueError, AttributeError) as error:  # JSON, but not of this kind
        raise UserError(f"{folder / CONFIG_FILE} is damaged ({error}); save the model again") from error


def _put(model: Decoder, tensors: dict[str, torch.Tensor], folder: Path, may_miss: tuple[str, ...] = ()) -> None:
    """Loads tensors into a model; those whose names end so may be missing, and keep the model's own values."""
    if model.config.tie_embeddings and "embedding.weight" in tensors:
        tensors[_TIED] = tensors["embedding.weight"]
    own = {name: tensor for name, tensor in model.state_dict().items() if may_miss and name.endswith(may_miss)}
    try:
        model.load_state_dict(own | tensors)
    except RuntimeError as error:
        problem = " ".join(str(error).split())
        raise UserError(f"{folder}: the weights do not fit the config: {problem}") from error
