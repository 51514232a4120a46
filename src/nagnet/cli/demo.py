"""Train a norm-agnostic model and its pre-norm twin on real text, and show the difference.

The same as nagnet compare stdlib-tiny: Python's own standard library as text, minutes on two CPU cores.
"""

from dataclasses import dataclass

from nagnet.cli.compare import CommonOptions, demo_plan, run


@dataclass
class Options(CommonOptions):
    """How to run the demo."""


def main(options: Options) -> int:
    """Runs the demo."""
    return run(options, demo_plan(options))
