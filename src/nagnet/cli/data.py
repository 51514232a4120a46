"""Turn text into token shards that training reads from disk, and check them.

docs/data.md has the guide.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from nagnet.data.manifest import Manifest, Totals


@dataclass
class Prepare:
    """Tokenize text into shards, with held-out documents, the tokenizer and a manifest of hashes.

    Run the same command again after an interruption: finished shards are kept, and the result is the same to the
    byte. Other arguments, but for the number of workers, are refused.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Text: stdlib (Python's own source), a file or folder of text, .jsonl or .parquet, or a data set on the Hugging
    Face hub, hf:OWNER/NAME or hf:OWNER/NAME/SUBSET, where hf:climbmix stands for karpathy/climbmix-400b-shuffle and
    hf:fineweb-edu for HuggingFaceFW/fineweb-edu/sample-10BT."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder to write: new, empty, or left unfinished by the same command."""
    column: str = "text"
    """Field of JSON lines, or column of tables, that holds the text."""
    subset: str | None = None
    """Configuration of a data set on the hub."""
    split: str = "train"
    """Split of a data set on the hub."""
    tokenizer: Path | None = None
    """A tokenizer.json of nagnet. Without it one is trained."""
    vocab_size: int | None = None
    """Ids of the tokenizer that is trained; 32,768 if not given."""
    tokenizer_bytes: int = 100_000_000
    """Bytes of text, the first of the source, to train the tokenizer on."""
    shard_tokens: int = 2**27
    """Most tokens in a shard (2 bytes each, 4 for a vocabulary above 65,536)."""
    max_bytes: int | None = None
    """Take so many bytes of text at most, whole documents."""
    max_documents: int | None = None
    """Take so many documents at most."""
    held_out_bytes: int = 10_000_000
    """Hold out so many bytes of text at most for evaluation, whole documents, and no more than 5 % of it."""
    workers: int | None = None
    """Processes that tokenize; one for each core if not given. The result does not depend on it."""
    json: bool = False
    """Print the result as JSON, for a program to read."""


@dataclass
class Verify:
    """Read every file of a prepared folder and compare it with its hash; exit 2 names the first that differs."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """A folder written by nagnet data prepare."""
    json: bool = False
    """Print the result as JSON, for a program to read."""


Options = tyro.conf.OmitSubcommandPrefixes[
    Annotated[Prepare, tyro.conf.subcommand("prepare")] | Annotated[Verify, tyro.conf.subcommand("verify")]
]


def main(options: Prepare | Verify) -> None:
    """Runs the subcommand."""
    if isinstance(options, Prepare):
        _prepare(options)
    else:
        _verify(options)


def _prepare(options: Prepare) -> None:
    from nagnet.data.prepare import Arguments, prepare

    values = {name: getattr(options, name) for name in Arguments.__dataclass_fields__}
    start = time.monotonic()
    with _Meter(str(options.out)) as meter:
        manifest = prepare(
            Arguments(**values), options.out, options.workers or _cores(), progress=meter.update, notice=meter.notice
        )
    _print_result(options.out, manifest, options.json, {"seconds": round(time.monotonic() - start, 3)})


def _verify(options: Verify) -> None:
    from nagnet.data.shards import open_shards

    manifest = open_shards(options.folder, verify=True).manifest
    _print_result(options.folder, manifest, options.json, {"verified": True})


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _print_result(folder: Path, manifest: Manifest, as_json: bool, extra: dict[str, Any]) -> None:
    from dataclasses import asdict

    totals = manifest.totals
    if as_json:
        result = {
            "folder": str(folder),
            "source": manifest.source,
            "content_hash": manifest.content_hash,
            "vocab_size": manifest.vocab_size,
            "shards": len(manifest.shards),
            **asdict(totals),
            **extra,
        }
        print(json.dumps(result, indent=2))
        return
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in totals.dropped.items()) or "none"
    print(f"source     {manifest.source}")
    print(
        f"training   {totals.documents:,} documents, {totals.bytes / 1e6:,.1f} MB, {totals.tokens:,} tokens "
        f"({totals.bytes / totals.tokens:.2f} bytes each) in {len(manifest.shards):,} shards"
    )
    print(f"held out   {totals.held_out_documents:,} documents, {totals.held_out_bytes / 1e6:,.1f} MB")
    print(f"dropped    {dropped}")
    print(f"tokenizer  {manifest.vocab_size:,} ids")
    print(f"hash       {manifest.content_hash}")
    if "verified" in extra:
        print(f"{folder}: every file is as it was written")


class _Meter:
    """Shows how much text is done, at what rate, and, where the whole is known, the time left."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._progress: Any = None

    def __enter__(self) -> _Meter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.__exit__(kind, error, trace)

    def notice(self, line: str) -> None:
        """Print a line that is not part of the result."""
        print(line, file=sys.stderr, flush=True)

    def update(self, totals: Totals, n_bytes: int | None) -> None:
        """Show the counts; the first call says where this run begins."""
        from nagnet.training.progress import Progress

        done, tokens = totals.kept_bytes, totals.tokens
        if self._progress is None:
            self._start, self._first_bytes, self._first_tokens = time.monotonic(), done, tokens
            left = math.inf if n_bytes is None else max(1, n_bytes - done)
            self._progress = Progress(self._label, left).__enter__()
        seconds = max(time.monotonic() - self._start, 1e-9)
        rate, token_rate = (done - self._first_bytes) / seconds, (tokens - self._first_tokens) / seconds
        self._progress.update(
            done - self._first_bytes,
            f"{done / 1e6:,.1f} MB, {tokens / 1e6:,.1f}M tokens, {rate / 1e6:.2f} MB/s, {token_rate:,.0f} tokens/s",
        )
