"""Score a model that nagnet train, compare, demo or import wrote: by text, or by tasks.

CHECKPOINT is a model folder, a checkpoint or the folder of a training run. A model whose logits depend on later tokens
is refused. docs/evaluation.md says what is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from nagnet.cli.device import DeviceName, resolve_device
from nagnet.errors import UserError


@dataclass
class Bpb:
    """Bits per byte of held-out text: independent of tokenizer, batch size and number of processes.

    The text is what the model's run held out, or that of --data. Several processes share the documents: torchrun
    --nproc-per-node N -m nagnet evaluate bpb ...
    """

    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """Model folder, checkpoint, or folder of a training run."""
    data: str | None = None
    """A prepared folder, or a file or folder of text, whose held-out part is scored; default: the run's own."""
    whole: bool = False
    """Score all of --data, text that the model was not trained on."""
    max_bytes: int | None = None
    """Score so many bytes at most, whole documents; default: as the run did, else all."""
    seq_len: int | None = None
    """Most tokens the model sees at a time; default: as in training."""
    batch_size: int = 16
    """Sequences scored at a time; the result does not depend on it."""
    dtype: Literal["auto", "float64", "float32"] = "auto"
    """Number type of the model. auto: float64, on mps float32, where sums agree to 6 digits only."""
    freeze_scale: bool = False
    """Give every token the same scale exp(s), of the text's mean s, instead of its own confidence."""
    skip_threshold: float | None = None
    """Tokens skip sublayers whose rotation score is not above this, 0 to 1; default: as the model was trained."""
    tokenizer: Path | None = None
    """The model's tokenizer.json, where it is not found beside the model."""
    device: DeviceName = "auto"
    """Where to compute."""
    json: bool = False
    """Print JSON on standard output and nothing else there."""


@dataclass
class Core:
    """CORE (DCLM): tasks in context, accuracy with guessing at 0, and their mean.

    Writes answers.jsonl as they come, and core.json at the end, to a new folder. After a stop the same command with
    --resume does what is missing.
    """

    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """Model folder, checkpoint, or folder of a training run."""
    bundle: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="BUNDLE")]
    """Folder with core.yaml, eval_meta_data.csv and eval_data/."""
    max_per_task: int | None = None
    """Most examples of each task, the first after shuffling; default: all."""
    max_tokens: int | None = None
    """Longest prompt; of a longer one the last tokens are kept. Default: the model's max_seq_len."""
    batch_tokens: int | None = None
    """Most tokens in a forward pass, padding included; default: 4,096 on a CPU, 32,768 elsewhere."""
    compile: Literal["auto", "always", "never"] = "auto"
    """Compile the blocks: half a minute at first, then up to 1.7 times as fast, a narrow model most. auto: on a CPU, if
    the bundle is large enough for the model to win more than it costs."""
    freeze_scale: bool = False
    """Give every token the same scale exp(s), of the mean s over the run's held-out text or --data."""
    data: str | None = None
    """With --freeze-scale: a prepared folder, or a file or folder of text; default: the run's own."""
    skip_threshold: float | None = None
    """Tokens skip sublayers whose rotation score is not above this, 0 to 1; default: as the model was trained."""
    tokenizer: Path | None = None
    """The model's tokenizer.json, where it is not found beside the model."""
    out: Path | None = None
    """New folder for the answers; default: runs/core-DATE-TIME."""
    resume: bool = False
    """Go on from the answers in --out; start there if it has none."""
    device: DeviceName = "auto"
    """Where to compute."""
    force: bool = False
    """Delete an earlier evaluation in the output folder first."""
    json: bool = False
    """Print core.json on standard output instead of the table."""


@dataclass
class Harness:
    """The tasks of lm-eval, EleutherAI's evaluation harness (pip install 'nagnet[harness]').

    All that lm-eval's own program offers: python -m nagnet.evaluation.harness --model nagnet --model_args
    checkpoint=CHECKPOINT --tasks ...
    """

    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """Model folder, checkpoint, or folder of a training run."""
    tasks: tuple[str, ...]
    """Names of tasks, lm-eval's own or those of --include-path."""
    include_path: Path | None = None
    """Folder with task files of your own."""
    num_fewshot: int | None = None
    """Solved examples before each question; default: as the task says."""
    limit: int | None = None
    """Most examples of each task; default: all."""
    batch_size: int | None = None
    """Most rows of a forward pass; default: as many as make 4,096 tokens on a CPU, 32,768 elsewhere."""
    max_length: int | None = None
    """Most tokens the model is shown at a time; default: its max_seq_len."""
    compile: bool = False
    """Compile the blocks: half a minute at first, then up to 1.7 times as fast, a narrow model most."""
    tokenizer: Path | None = None
    """The model's tokenizer.json, where it is not found beside the model."""
    out: Path | None = None
    """New folder for harness.json; default: nothing is written."""
    device: DeviceName = "auto"
    """Where to compute."""
    force: bool = False
    """Delete an earlier evaluation in the output folder first."""
    json: bool = False
    """Print harness.json on standard output instead of the table."""


Options = tyro.conf.OmitSubcommandPrefixes[
    Annotated[Bpb, tyro.conf.subcommand("bpb")]
    | Annotated[Core, tyro.conf.subcommand("core")]
    | Annotated[Harness, tyro.conf.subcommand("harness")]
]


def main(options: Bpb | Core | Harness) -> None:
    """Runs the subcommand."""
    from nagnet.training.distributed import join_world

    with join_world(resolve_device(options.device)) as (world, device):
        if isinstance(options, Bpb):
            from nagnet.cli.evaluate_bpb import evaluate_bpb

            evaluate_bpb(options, world, device)
        elif world.size > 1:
            raise UserError(f"evaluate {type(options).__name__.lower()} runs in one process; start it without torchrun")
        elif isinstance(options, Harness):
            from nagnet.cli.evaluate_harness import evaluate_harness

            evaluate_harness(options, device)
        else:
            from nagnet.cli.evaluate_core import evaluate_core

            evaluate_core(options, device)
