"""The folder a run writes to: claimed once, never shared by two runs, never another program's."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from nagnet.errors import UserError

MARKER = ".nagnet-run"
_MARKER_TEXT = "This folder belongs to one run of nagnet. A command given --force may delete everything in it.\n"


def check_output_folder(path: Path, force: bool) -> None:
    """Refuse early, and without writing, a folder that `claim_output_folder` would refuse for what it holds.

    Raises:
        UserError: As there, if the folder is a file, or holds an earlier run and ``force`` is false, or other files.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"output folder {path} is a file; name a folder")
    if path.is_dir() and any(entry.name != MARKER for entry in path.iterdir()):
        _check_replaceable(path, force)


def check_inputs_outside(path: Path, inputs: Iterable[Path]) -> None:
    """Refuse an output folder that holds what is read: ``--force`` would delete it.

    Args:
        path: The output folder.
        inputs: Files and folders that the command reads; what does not exist is passed over.

    Raises:
        UserError: If one of them is the folder or lies in it.
    """
    for read in inputs:
        if read.exists() and read.resolve().is_relative_to(path.resolve()):
            raise UserError(f"output folder {path} holds {read}, which is to be read; name another folder")


def claim_output_folder(path: Path, force: bool) -> Path:
    """Make the folder of a new run, or take an empty one.

    The marker file written here is what lets a later ``--force`` delete the folder's content; without it
    nothing is ever deleted. Call this after every other check of the input, so that a refused run leaves
    nothing behind. A folder which holds the marker alone counts as empty.

    Args:
        path: The folder; its parents are made too.
        force: Delete an earlier run's files first.

    Returns:
        The path, of a folder that holds the marker alone.

    Raises:
        UserError: If the folder holds an earlier run and ``force`` is false, if it holds anything that nagnet
            did not write, or if it cannot be made or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        contents = [entry for entry in path.iterdir() if entry.name != MARKER]
        if contents:
            _check_replaceable(path, force)
            for entry in contents:
                _delete(entry)
        (path / MARKER).write_text(_MARKER_TEXT, encoding="utf-8")
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"output folder {path}: {error.filename or path} is a file") from error
    except OSError as error:
        raise UserError(f"output folder {path}: {error.strerror}") from error
    return path


def _check_replaceable(path: Path, force: bool) -> None:
    if not (path / MARKER).is_file():
        raise UserError(f"output folder {path} holds files that nagnet did not write; name a new or empty one")
    if not force:
        raise UserError(f"output folder {path} holds another run; name a new one, or delete that run with --force")


def _delete(entry: Path) -> None:
    # A link is removed, never what it points to.
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()
