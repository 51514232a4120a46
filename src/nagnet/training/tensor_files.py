"""Training state as named tensors in safetensors files, written and read by all processes (torch DCP).

DCP's own format keeps a pickled index beside its files; its safetensors format needs none, so reading it runs no code.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nagnet.errors import UserError
from nagnet.models.decoder import Decoder
from nagnet.training.distributed import World, describe_os_error

_OPTIMIZER = "optimizer/"  # a name is optimizer/<parameter>/<key of its state>
_TIED = "readout.weight"  # shares the embedding's storage in a tied model, whose file holds it once


def model_tensors(model: Decoder) -> dict[str, Tensor]:
    """Parameters and buffers by the names of a model's file; they share the model's memory."""
    tied = {_TIED} if model.config.tie_embeddings else set()
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def optimizer_tensors(model: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, Tensor]:
    """The state of all optimizers, named after the model's parameters.

    Raises:
        UserError: for state that is no tensor.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors = {}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    kind = f"{type(optimizer).__name__} keeps {key} as {type(value).__name__}"
                    raise UserError(f"{kind}, and checkpoints hold tensors; choose an optimizer such as Muon or AdamW")
                tensors[f"{_OPTIMIZER}{names[id(parameter)]}/{key}"] = value
    return tensors


def allocate_state(
    folder: Path, model: nn.Module, optimizers: Iterable[Optimizer]
) -> tuple[dict[Tensor, dict[str, Tensor]], dict[str, Tensor]]:
    """Makes room for the optimizer state that ``folder`` holds, sharded as the parameters are.

    Returns:
        State of each parameter that has some, and the same tensors by their names in the files.

    Raises:
        UserError: if a file is damaged, or has state of a parameter that is not trained.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    if not folder.is_dir():  # saved before the first step
        return {}, {}
    trained = _trained(model, optimizers)
    states: dict[Tensor, dict[str, Tensor]] = {}
    by_name: dict[str, Tensor] = {}
    with _damage_is_user_error(folder):
        metadata: Any = HuggingFaceStorageReader(str(folder)).read_metadata()
    for name, entry in metadata.state_dict_metadata.items():
        if not name.startswith(_OPTIMIZER):
            continue
        parameter_name, _, key = name.removeprefix(_OPTIMIZER).rpartition("/")
        if parameter_name not in trained:
            raise UserError(f"{folder} has optimizer state of {parameter_name}, which is not trained here")
        parameter, group = trained[parameter_name]
        dtype = entry.properties.dtype
        if key == "step":  # AdamW's counter stays on the CPU, unless its kernel reads it
            on_device = group.get("fused") or group.get("capturable")
            tensor = torch.zeros(entry.size, dtype=dtype, device=parameter.device if on_device else "cpu")
        elif entry.size == parameter.shape:
            tensor = torch.zeros_like(parameter, dtype=dtype)
        else:
            tensor = torch.zeros(entry.size, dtype=dtype, device=parameter.device)
        states.setdefault(parameter, {})[key] = by_name[name] = tensor
    return states, by_name


def _trained(model: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, tuple[Tensor, dict[str, Any]]]:
    """Each trained parameter and its group, by name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: (parameter, group)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], world: World) -> None:
    """Writes tensors, whole or sharded, each part once; every process must call this with the same names.

    Raises:
        UserError: in every process, if one of them could not write.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    if not tensors:
        return
    with _dcp_errors_are_ordinary():
        save(
            dict(tensors),
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
            no_dist=world.size == 1,
        )


def read_tensors(folder: Path, tensors: Mapping[str, Tensor], world: World) -> None:
    """Fills tensors, whole or sharded, from the safetensors files in ``folder``; every process must call this.

    Raises:
        UserError: in every process, if a file is damaged or lacks one of them, or one has another shape there.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    if not tensors:
        return
    with _damage_is_user_error(folder), _dcp_errors_are_ordinary():
        load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=world.size == 1)


def check_tensor_file(file: Path) -> None:
    """Refuses a file that is no safetensors file, such as a pickle under its name, by its header.

    Raises:
        UserError: naming the file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt"):
            pass
    except SafetensorError as error:
        raise UserError(f"{file} is damaged or no safetensors file ({error}); use another checkpoint") from error


@contextmanager
def _dcp_errors_are_ordinary() -> Iterator[None]:
    """Raises the first of the errors that DCP collected from all processes, in every process."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            # DCP says so in each call by a single process, and is told that it is one.
            warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)", UserWarning)
            yield
    except CheckpointException as error:  # a BaseException
        cause, _ = next(iter(error.failures.values()))
        if isinstance(cause, OSError):
            raise UserError(describe_os_error(cause)) from error
        raise cause from error


@contextmanager
def _damage_is_user_error(folder: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, RuntimeError, ValueError, KeyError, AssertionError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"the tensors in {folder} do not fit or are damaged ({reason}); use another checkpoint"
        ) from error
