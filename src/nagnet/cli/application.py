"""Choose the command, read its options, and turn what goes wrong into one line and an exit code."""

import dataclasses
import errno
import importlib
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from nagnet.cli.names import unknown_name
from nagnet.cli.registry import COMMANDS
from nagnet.errors import UserError

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 128 + 2  # what a shell reports for SIGINT
EXIT_BROKEN_PIPE = 128 + 13  # and for SIGPIPE

# The user's surroundings, not a fault of the program: these need a line, not a traceback.
_ENVIRONMENT_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS}


def run(arguments: Sequence[str]) -> int:
    """Run one command line.

    Args:
        arguments: The words after ``nagnet``.

    Returns:
        The exit code: 0 for success, 2 for bad input or a full or read-only disk, 130 after an interrupt,
        else what the command returned.
    """
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        return _guarded(lambda: print(_overview()))
    if name == "--version":
        return _guarded(lambda: print(_version()))
    return _guarded(lambda: _run_command(name, rest))


def _overview() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items())
    return (
        "usage: nagnet COMMAND [OPTIONS]\n\n"
        "Norm-agnostic residual streams: train, measure and compare.\n\n"
        f"commands:\n{commands}\n\n"
        "nagnet COMMAND --help lists the options of a command; nagnet --version prints the version."
    )


def _version() -> str:
    # Costs a third of the time that --help takes in all, so it is imported only here.
    from importlib.metadata import version

    return f"nagnet {version('nagnet')}"


def _run_command(name: str, arguments: Sequence[str]) -> int | None:
    if name not in COMMANDS:
        raise unknown_name("command", name, COMMANDS)
    command = COMMANDS[name]
    try:
        import tyro

        module = importlib.import_module(command.module)
        options = tyro.cli(
            module.Options,
            prog=f"nagnet {name}",
            description=module.__doc__,
            args=_arranged(arguments, module.Options) if dataclasses.is_dataclass(module.Options) else arguments,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
        return module.main(options)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "nagnet") or package in sys.stdlib_module_names:
            raise
        raise UserError(
            f"{name} needs {package}, which is not installed: pip install 'nagnet[{command.extras}]'"
        ) from error


def _arranged(arguments: Sequence[str], options: Any) -> list[str]:
    """Puts the words that belong to no option first, as the parser wants them in one row, and gathers the values of an
    option that takes several and is given more than once.

    Args:
        options: the dataclass of the command's options.
    """
    defaults = {f"--{field.name.replace('_', '-')}": field.default for field in dataclasses.fields(options)}
    loose: list[str] = []
    given: list[list[str]] = []
    of_listed: dict[str, list[str]] = {}
    target: list[str] = []
    room = 0.0  # for values of the option that was read last, which are its ``target``
    for word in arguments:
        if word.startswith("--"):
            default = defaults.get(word)
            room = math.inf if isinstance(default, tuple) else 0 if isinstance(default, bool) or "=" in word else 1
            if word not in of_listed:
                given.append([word])
            if isinstance(default, tuple):
                of_listed.setdefault(word, given[-1])
            target = of_listed.get(word, given[-1])
        elif room:
            target.append(word)
            room -= 1
        else:
            loose.append(word)
    return loose + [word for group in given for word in group]


def _guarded(action: Callable[[], int | None]) -> int:
    """Run the action and flush its output; known failures become one line and an exit code."""
    try:
        code = action() or 0
        sys.stdout.flush()
        return code
    except UserError as error:
        return _fail(f"error: {error}", EXIT_BAD_INPUT)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        _drop_unwritable_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno not in _ENVIRONMENT_ERRORS:
            raise
        _drop_unwritable_output()
        where = f": {error.filename}" if error.filename else ""
        return _fail(f"error: {error.strerror}{where}", EXIT_BAD_INPUT)


def _fail(message: str, code: int) -> int:
    print(f"nagnet: {message}", file=sys.stderr)
    return code


def _drop_unwritable_output() -> None:
    """Where stdout is what failed, send its buffer to nowhere: the interpreter flushes it again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
