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
    "demo": Command(
        "nagnet.cli.demo",
        "Train a norm-agnostic model and its pre-norm twin, show the difference",
        "train,report",
    ),
    "train": Command("nagnet.cli.train", "Train a recipe, with checkpoints, metrics and a watch on the gates"),
    "preflight": Command("nagnet.cli.preflight", "A few tiny experiments before a big run: memory, speed, cost, gates"),
    "compare": Command("nagnet.cli.compare", "Compare arms on the same batches and FLOPs, over seeds", "train,report"),
    "depth-curve": Command(
        "nagnet.cli.depth_curve", "Show what skipping sublayers costs and saves a trained model", "train,report"
    ),
    "probe": Command("nagnet.cli.probe", "Look inside models: every figure, its numbers, one report", "train,report"),
    "generate": Command("nagnet.cli.generate", "Continue text with a trained model, shaded by its confidence"),
    "extrapolate": Command("nagnet.cli.extrapolate", "Predict the gap between two arms at a larger budget"),
    "data": Command("nagnet.cli.data", "Turn text into token shards for training, and check them", extras="data"),
    "evaluate": Command(
        "nagnet.cli.evaluate", "Score a model: bits per byte of text, the tasks of CORE or of lm-eval", extras="eval"
    ),
    "import": Command("nagnet.cli.import_model", "Turn a checkpoint of nanochat into a model folder"),
    "export": Command("nagnet.cli.export_model", "Turn a model into a folder that transformers loads without nagnet"),
    "bench": Command("nagnet.cli.bench", "Measure speed and memory of the update, the step and the loss"),
    "recipes": Command("nagnet.cli.recipes", "List the named experiments"),
    "toy-depth": Command(
        "nagnet.cli.toy_depth",
        "Show how 60 random layers shrink a vector without a residual stream",
        extras="train,report",
    ),
}
