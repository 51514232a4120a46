"""Help for a name that does not exist."""

import difflib
from collections.abc import Iterable

from nagnet.errors import UserError


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that is not among the known ones, with the nearest of them.

    Args:
        kind: What the name stands for, such as ``"command"``.
        name: What the user wrote.
        known: The names that exist, at least one.

    Returns:
        An error of one line, to be raised by the caller.
    """
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]
    return UserError(f"unknown {kind} {name!r}; did you mean {nearest!r}?")
