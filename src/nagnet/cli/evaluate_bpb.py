"""What nagnet evaluate bpb does."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from nagnet.data.corpus import hash_documents
from nagnet.evaluation.frozen_scale import frozen_scale
from nagnet.training.distributed import World
from nagnet.training.evaluated import open_model
from nagnet.training.progress import Progress

if TYPE_CHECKING:
    from nagnet.cli.evaluate import Bpb


def evaluate_bpb(options: Bpb, world: World, device: torch.device) -> None:
    """Scores the text and prints the result in the main process."""
    dtype = _dtype(options.dtype, device)
    opened = open_model(
        options.checkpoint,
        device,
        dtype,
        world,
        options.tokenizer,
        options.seq_len,
        options.freeze_scale,
        options.skip_threshold,
    )
    documents, source = opened.text(options.data, options.max_bytes, options.whole)
    log_norm = None
    if options.freeze_scale:
        with Progress("measuring the scale", 1.0, quiet=not world.is_main) as progress:
            log_norm = opened.mean_log_norm(documents, options.batch_size, lambda done, of: progress.update(done / of))
    frozen = nullcontext() if log_norm is None else frozen_scale(opened.model, log_norm)
    with Progress("scoring", 1.0, quiet=not world.is_main) as progress, frozen:
        scores = opened.score(documents, None, options.batch_size, lambda done, of: progress.update(done / of))
    skips = opened.skip_rates()
    result = {
        "bits_per_byte": scores.bits_per_byte,
        "nats_per_token": float(scores.nats.sum() / scores.n_tokens.sum()),
        "documents": len(scores.names),
        "bytes": int(scores.n_bytes.sum()),
        "tokens": int(scores.n_tokens.sum()),
        "seq_len": opened.seq_len,
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "processes": world.size,
        "frozen_log_norm": log_norm,
        "skip_rates": None if skips is None else skips._asdict(),
        "text": source,
        "text_hash": hash_documents(documents),
        "model": str(opened.saved.folder),
        "model_hash": opened.saved.content_hash(),
    }
    if world.is_main:
        print(json.dumps(result, indent=2) if options.json else _describe(result))


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name != "auto":
        return getattr(torch, name)
    return torch.float32 if device.type == "mps" else torch.float64  # mps has no float64


def _describe(result: dict[str, Any]) -> str:
    lines = [
        f"model   {result['model']}, weights {result['model_hash'][:12]}",
        f"text    {result['text']}, {result['documents']:,} documents, {result['bytes']:,} bytes, "
        f"hash {result['text_hash'][:12]}",
        f"scored  {result['tokens']:,} tokens, at most {result['seq_len']:,} at a time, in {result['dtype']}",
    ]
    if result["frozen_log_norm"] is not None:
        lines.append(f"scale   exp({result['frozen_log_norm']:.4f}) for every token, instead of its own")
    if result["skip_rates"] is not None:
        shares = (f"{share:.1%} of {name.replace('_', '-')}" for name, share in result["skip_rates"].items())
        lines.append(f"skipped {', '.join(shares)}")
    bits, nats = result["bits_per_byte"], result["nats_per_token"]
    return "\n".join([*lines, f"result  {bits:.6f} bits per byte ({nats:.6f} nats per token)"])
