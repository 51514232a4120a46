"""The CHECKPOINT argument of commands that read a model: any folder that this program writes models to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nagnet.errors import UserError

if TYPE_CHECKING:
    import torch

    from nagnet.data.tokenizer import Tokenizer
    from nagnet.models.decoder import Decoder

TOKENIZER_FILE = "tokenizer.json"
_LEVELS = 3  # the tokenizer of runs/a/checkpoints/step-0000100 is in runs/a


def open_model(path: Path, device: torch.device) -> tuple[Decoder, Tokenizer, Path]:
    """Reads a model and the tokenizer it was trained with.

    Args:
        path: a model folder (``model/``, an arm of a comparison), a checkpoint, or the folder of a run, whose finished
            model is taken, else its latest checkpoint.

    Returns:
        The model on ``device``, the tokenizer, and the folder that the model was read from.

    Raises:
        UserError: if there is no model, more than one, or a file is damaged.
    """
    from nagnet.data.tokenizer import Tokenizer
    from nagnet.models.checkpoint import load_model
    from nagnet.training.checkpoint import RECORD_FILE, verify_files

    folder = find_model(path)
    if (folder / RECORD_FILE).exists():
        verify_files(folder)
    parents = [folder, *folder.absolute().parents][:_LEVELS]
    tokenizers = [parent / TOKENIZER_FILE for parent in parents if (parent / TOKENIZER_FILE).is_file()]
    if not tokenizers:
        raise UserError(f"{folder} has no {TOKENIZER_FILE}, nor has a folder above; copy there that of its training")
    return load_model(folder, device).eval(), Tokenizer.load(tokenizers[0]), folder


def find_model(path: Path) -> Path:
    """The folder of the model that ``path`` means.

    Raises:
        UserError: if there is none, or more than one.
    """
    from nagnet.models.checkpoint import CONFIG_FILE
    from nagnet.training.checkpoint import Checkpoints
    from nagnet.training.run import CHECKPOINTS_FOLDER, MODEL_FOLDER

    if not path.is_dir():
        raise UserError(f"{path} is no folder; name one that nagnet train, compare or demo wrote")
    for folder in (path, path / MODEL_FOLDER):
        if (folder / CONFIG_FILE).is_file():
            return folder
    for folder in (path, path / CHECKPOINTS_FOLDER):
        checkpoints = Checkpoints(folder)
        if steps := checkpoints.steps():
            return checkpoints.path(steps[-1])
    below = sorted(child for child in path.iterdir() if (child / CONFIG_FILE).is_file())
    if len(below) == 1:
        return below[0]
    if below:
        raise UserError(f"{path} holds {len(below)} models; name one: {', '.join(str(child) for child in below)}")
    raise UserError(f"{path} holds no model; name a folder that nagnet train, compare or demo wrote")
