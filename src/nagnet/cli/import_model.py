"""Turn another program's checkpoint into a model folder of this package.

nagnet import nanochat DIR OUT reads model_STEP.pt and meta_STEP.json of AlxSp/nag-nanochat, both its architectures. The
weights are taken over as they are, in float32; no code in a checkpoint ever runs. Its tokenizer is not imported.

Writes to a new folder: config.json, model.safetensors, and import.json, which says where they come from.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from nagnet.cli.output_folder import check_output_folder, claim_output_folder


@dataclass
class Options:
    """What to import."""

    program: Annotated[Literal["nanochat"], tyro.conf.Positional]
    """Whose checkpoint it is."""
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder with the checkpoint."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """New folder for the model."""
    step: int | None = None
    """Training step of the checkpoint; default: the last in the folder."""
    force: bool = False
    """Delete an earlier import in the output folder first."""
    json: bool = False
    """Print import.json on standard output instead of a line."""


def main(options: Options) -> None:
    """Imports the checkpoint."""
    from nagnet.files import write_atomically
    from nagnet.interop.nanochat import import_nanochat
    from nagnet.models.checkpoint import save_model
    from nagnet.models.flops import parameter_counts

    check_output_folder(options.out, options.force)
    imported = import_nanochat(options.source, options.step)
    config = imported.model.config
    record = {
        "program": options.program,
        "arch": imported.arch,
        "step": imported.step,
        "source": str(imported.source),
        "meta": imported.meta,
        "parameters": parameter_counts(config)["total"],
    }
    claim_output_folder(options.out, options.force)
    write_atomically(options.out / "import.json", (json.dumps(record, indent=2) + "\n").encode())
    save_model(imported.model, options.out)
    if options.json:
        print(json.dumps(record, indent=2))
        return
    print(
        f"{options.out}: {imported.arch} at step {imported.step:,}, {config.n_layers} blocks x {config.d_model}, "
        f"vocabulary {config.vocab_size:,}, {record['parameters']:,} parameters"
    )
