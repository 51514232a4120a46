"""Continue text with a trained model, each token shaded by the model's confidence.

Confidence is exp(s_N), the norm of the stream at the end: in a norm-agnostic model the inverse temperature of the next
token's distribution. The deeper the shade, the more of this text's tokens so far were less confident. One text is
written as it comes, several in batches.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from nagnet.cli.device import DeviceName, resolve_device
from nagnet.errors import UserError

if TYPE_CHECKING:
    from nagnet.generation.text import TextCompletion


@dataclass
class Options:
    """What to continue, and how."""

    checkpoint: tyro.conf.Positional[Path]
    """Model folder, checkpoint, or folder of a training run."""
    prompt: str | None = None
    """Text to continue."""
    prompts: Path | None = None
    """File with a prompt a line; in a .jsonl file each line is an object with the key "prompt"."""
    samples: int = 1
    """Continuations of each prompt."""
    tokens: int = 200
    """Tokens to add to each prompt, at most."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int = 0
    """Draw among this many likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Draw among the likeliest tokens that have this probability together; 1: all."""
    min_p: float = 0.0
    """Draw among tokens with this share of the likeliest one's probability; 0: all."""
    seed: int = 0
    """Seed of the draws. Each prompt and sample has draws of its own, whatever else is in the batch."""
    stop: tuple[str, ...] = ()
    """Strings that end a text."""
    past_the_end: bool = False
    """Go on where the model would end the document."""
    context: int | None = None
    """Tokens a text may have, prompt included; default: what the model was made for."""
    batch_size: int = 8
    """Texts at a time."""
    skip_threshold: float | None = None
    """Tokens skip sublayers whose rotation score is not above this, 0 to 1; default: as the model was trained."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the blocks' matrices; embedding, gates and readout stay float32."""
    compile: bool = False
    """Compile the step first: some twenty seconds, five once it was done here; then several times faster. For long
    texts and large models."""
    plain: bool = False
    """No shades, also in a terminal with colour."""
    json: bool = False
    """Print JSON: each token with its log probability (nats) and confidence."""
    tokenizer: Path | None = None
    """The model's tokenizer.json, where it is not found beside the model."""
    device: DeviceName = "auto"
    """Where to compute."""


def main(options: Options) -> None:
    """Reads the model, continues the prompts, prints."""
    import torch

    from nagnet.evaluation.saved_model import find_model
    from nagnet.generation.sampler import Sampling
    from nagnet.models.checkpoint import load_model

    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.min_p, options.seed)
    prompts = _prompts(options)
    for name in ("samples", "tokens", "batch_size"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(options, name)}; give 1 or more")
    saved = find_model(options.checkpoint)
    model = load_model(saved.folder, resolve_device(options.device)).eval()
    tokenizer = saved.tokenizer(model.config.vocab_size, options.tokenizer)
    if options.skip_threshold is not None:
        model.set_skip_threshold(options.skip_threshold)
    model.to(getattr(torch, options.dtype))
    jobs = [(p, s) for p in range(len(prompts)) for s in range(options.samples)]
    printer = _JsonPrinter(tokenizer, saved.folder) if options.json else _TextPrinter(model, options, len(jobs) > 1)
    for start in range(0, len(jobs), options.batch_size):
        batch = jobs[start : start + options.batch_size]
        _run(options, sampling, model, tokenizer, [(p, s, prompts[p]) for p, s in batch], printer)
    printer.close()


def _run(options: Options, sampling: Any, model: Any, tokenizer: Any, batch: list[Any], printer: Any) -> None:
    from nagnet.generation.text import complete_texts

    start = time.perf_counter()
    completed = complete_texts(
        model,
        tokenizer,
        [prompt for *_, prompt in batch],
        options.tokens,
        sampling,
        options.stop,
        options.past_the_end,
        [f"{p}:{s}" for p, s, _ in batch],
        options.compile,
        options.context,
        printer.piece,
        lambda confidences: printer.begin(batch, confidences),
        printer.skipped,
    )
    printer.end(batch, completed, time.perf_counter() - start)


def _prompts(options: Options) -> list[str]:
    if (options.prompt is None) == (options.prompts is None):
        raise UserError("give either --prompt TEXT or --prompts FILE")
    if options.prompt is not None:
        return [options.prompt]
    path = options.prompts
    assert path is not None
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read prompts from {path}: {error}") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        prompts.append(_from_json(path, number, line) if path.suffix == ".jsonl" else line)
    if not prompts:
        raise UserError(f"{path} holds no prompt; write one a line")
    return prompts


def _from_json(path: Path, number: int, line: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError):
        prompt = None
    if not isinstance(prompt, str):
        raise UserError(f'{path} line {number} is not an object with a text under "prompt"')
    return prompt


class _JsonPrinter:
    """Collects everything and prints one object at the end."""

    def __init__(self, tokenizer: Any, folder: Path):
        self._tokenizer, self._folder = tokenizer, folder
        self._rows: list[dict[str, Any]] = []
        self._skips: dict[str, Any] = {}

    def skipped(self, rates: dict[str, Any]) -> None:
        self._skips = {"skip_rates": {phase: shares._asdict() for phase, shares in rates.items()}}

    def begin(self, batch: list[Any], confidences: list[list[float]]) -> None:
        pass

    def piece(self, index: int, piece: Any) -> None:
        pass

    def end(self, batch: list[Any], completed: list[TextCompletion], seconds: float) -> None:
        for (prompt, sample, _), result in zip(batch, completed, strict=True):
            tokens = [
                {
                    "id": drawn.token,
                    "text": self._tokenizer.contents[drawn.token].decode("utf-8", "replace"),
                    "log_probability": drawn.log_probability,
                    "confidence": drawn.confidence,
                }
                for drawn in result.completion.tokens
            ]
            row = {"prompt_index": prompt, "sample": sample, "prompt": result.prompt, "text": result.text}
            self._rows.append(row | {"finish": result.completion.finish} | self._skips | {"tokens": tokens})

    def close(self) -> None:
        print(json.dumps({"model": str(self._folder), "completions": self._rows}, indent=2))


class _TextPrinter:
    """Prints one text as it comes; several when their batch is done, each under a line that names it."""

    def __init__(self, model: Any, options: Options, several: bool):
        from nagnet.cli.shades import Shades, shows_colour

        shaded = not options.plain and model.stream.has_norm_lane and shows_colour(sys.stdout)
        self._shades = Shades(sys.stdout, shaded)
        self._several = several
        self._pieces: dict[int, list[Any]] = {}
        self._confidences: list[list[float]] = []
        self._skips = ""

    def skipped(self, rates: dict[str, Any]) -> None:
        parts = (f"{phase} {r.sublayer_tokens:.0%} ({r.flops:.0%} of FLOPs)" for phase, r in rates.items())
        self._skips = f"; sublayers skipped in {', '.join(parts)}"

    def begin(self, batch: list[Any], confidences: list[list[float]]) -> None:
        self._pieces, self._confidences = {index: [] for index in range(len(batch))}, confidences
        if not self._several:
            self._shades.begin(batch[0][2], confidences[0])

    def piece(self, index: int, piece: Any) -> None:
        if self._several:
            self._pieces[index].append(piece)
        else:
            self._shades.write(piece.text, piece.confidence)

    def end(self, batch: list[Any], completed: list[TextCompletion], seconds: float) -> None:
        for index, (prompt, sample, text) in enumerate(batch):
            if self._several:
                print(f"--- prompt {prompt + 1}, sample {sample + 1}")
                self._shades.begin(text, self._confidences[index])
                for piece in self._pieces[index]:
                    self._shades.write(piece.text, piece.confidence)
            self._shades.end()
        n_tokens = sum(len(result.completion.tokens) for result in completed)
        ends = ", ".join(sorted({str(result.completion.finish) for result in completed}))
        note = f"{n_tokens} tokens, {n_tokens / seconds:,.1f} a second with the prompts; ended by: {ends}{self._skips}"
        print(note, file=sys.stderr)

    def close(self) -> None:
        pass
