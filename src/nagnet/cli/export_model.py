"""Turn a model into a folder for another program.

nagnet export hf CHECKPOINT DIR writes what transformers loads without nagnet: AutoModelForCausalLM.from_pretrained(DIR,
trust_remote_code=True) has the same logits, generates, trains, and lm_eval --model hf scores it. The modelling code in
DIR is made from nagnet's own sources. docs/exchange.md has the rest.

Writes to a new folder: config.json, model.safetensors, the tokenizer, modelling code, README.md (the model card).
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
    """What to export."""

    program: Annotated[Literal["hf"], tyro.conf.Positional]
    """For which program: hf is the transformers library of Hugging Face."""
    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """Model folder, checkpoint, or folder of a training run."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """New folder for the export."""
    tokenizer: Path | None = None
    """The model's tokenizer.json, where it is not found beside the model."""
    force: bool = False
    """Delete an earlier export in the output folder first."""
    json: bool = False
    """Print what was written as JSON instead of a line."""


def main(options: Options) -> None:
    """Exports the model."""
    from nagnet.evaluation.saved_model import find_model
    from nagnet.files import TOKENIZER_FILE, write_atomically
    from nagnet.interop.huggingface import hugging_face_files

    check_output_folder(options.out, options.force)
    saved = find_model(options.checkpoint)
    files = hugging_face_files(saved, options.tokenizer)
    claim_output_folder(options.out, options.force)
    for name, content in files.items():
        write_atomically(options.out / name, content)
    if options.json:
        sizes = {name: len(content) for name, content in files.items()}
        print(json.dumps({"model": str(saved.folder), "folder": str(options.out), "bytes": sizes}, indent=2))
        return
    without = "" if TOKENIZER_FILE in files else ", without a tokenizer: there is none beside the model"
    print(f"{options.out}: {saved.folder} for transformers, {len(files)} files{without}")
