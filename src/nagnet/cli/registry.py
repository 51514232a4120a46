"""The commands of ``nagnet``: one line each, nothing imported until one is chosen."""

from typing import NamedTuple


class Command(NamedTuple):
    """Where a command lives and what the list of commands says of it.

    Attributes:
        module: Dotted name of a module with a dataclass ``Options`` and ``main(options) -> int | None``.
        summary: One line for ``nagnet --help``.
        extras: What to install for it, as in ``pip install 'nagnet[EXTRAS]'``.
    """

    module: str
    summary: str
    extras: str = "train"


COMMANDS: dict[str, Command] = {
    "toy-depth": Command(
        "nagnet.cli.toy_depth",
        "Show how 60 random layers shrink a vector without a residual stream",
        extras="train,report",
    ),
}
