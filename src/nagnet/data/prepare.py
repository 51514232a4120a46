"""Makes a folder of token shards out of a source of text: in order, in parallel, and resumable."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nagnet.data.encoding import encode_batches, token_dtype
from nagnet.data.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    UNFINISHED_FILE,
    Manifest,
    Totals,
    digest_of_file,
)
from nagnet.data.selection import Limits, Selected, batches, describe_dropped, select, with_threshold
from nagnet.data.shards import open_shards
from nagnet.data.sources import HUB_PREFIX, Cursor, Source, open_source
from nagnet.data.text import has_long_line
from nagnet.data.tokenizer import Tokenizer, train_tokenizer
from nagnet.data.writing import (
    Checkpoint,
    HeldOutWriter,
    ShardWriter,
    Unfinished,
    remove_leftovers,
    verified,
)
from nagnet.errors import UserError
from nagnet.files import write_atomically

try:
    import fcntl
except ImportError:  # a system without it does without the lock
    fcntl = None

logger = logging.getLogger(__name__)

DEFAULT_VOCAB_SIZE = 32_768


@dataclass(frozen=True)
class Arguments:
    """What decides the content of a prepared folder.

    Attributes:
        source: As ``open_source`` reads it.
        column: Field or column that holds the text, of JSON lines and tables.
        subset: Configuration of a data set on the hub.
        split: Split of a data set on the hub.
        tokenizer: File of a tokenizer; None to train one.
        vocab_size: Ids of the tokenizer to train; None for 32,768, or where a file is given.
        tokenizer_bytes: UTF-8 bytes of text, the first of the source, that a tokenizer is trained on.
        shard_tokens: Most tokens in a shard; a longer document has one for itself.
        max_bytes: Most UTF-8 bytes of text taken, whole documents; None for all.
        max_documents: Most documents taken; None for all.
        held_out_bytes: Most UTF-8 bytes of text held out for evaluation, whole documents.
    """

    source: str
    column: str = "text"
    subset: str | None = None
    split: str = "train"
    tokenizer: Path | None = None
    vocab_size: int | None = None
    tokenizer_bytes: int = 100_000_000
    shard_tokens: int = 2**27
    max_bytes: int | None = None
    max_documents: int | None = None
    held_out_bytes: int = 10_000_000

    def check(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            UserError: If a number is out of range, or both a tokenizer and a vocabulary size are given.
        """
        for name in ("tokenizer_bytes", "shard_tokens", "max_bytes", "max_documents"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} {value} must be at least 1")
        if self.held_out_bytes < 0:
            raise UserError(f"--held-out-bytes {self.held_out_bytes} is negative; give 0 to hold out none")
        if self.tokenizer is not None and self.vocab_size is not None:
            raise UserError("--tokenizer and --vocab-size exclude each other; a tokenizer brings its vocabulary")

    def record(self) -> dict[str, Any]:
        """Return the arguments as JSON: a tokenizer file by the hash of its content."""
        values = asdict(self)
        if self.tokenizer is not None:
            return {**values, "tokenizer": Tokenizer.load(self.tokenizer).content_hash}
        return {**values, "vocab_size": self.vocab_size or DEFAULT_VOCAB_SIZE}


Report = Callable[[Totals, int | None], None]


def prepare(
    arguments: Arguments,
    out: str | Path,
    workers: int = 1,
    progress: Report | None = None,
    notice: Callable[[str], None] = logger.info,
) -> Manifest:
    """Read a source, tokenize it, and write shards, held-out documents, the tokenizer and a manifest.

    Run again after an interruption it keeps the finished shards and goes on; the result is the same to the byte.
    With other arguments, or a source that has changed, it refuses.

    Args:
        arguments: What to make.
        out: Folder to write; new, empty, or one that this function began.
        workers: Processes that tokenize; they do not change the result.
        progress: Called now and then with the counts so far and about how many bytes of text there are in all
            (None where unknown).
        notice: Called with a line for the user where something takes time or is out of the ordinary.

    Returns:
        The manifest, also of a folder that was complete already.

    Raises:
        UserError: If the arguments, the source or the folder do not allow it; nothing is written then.
    """
    out = Path(out)
    arguments.check()
    if workers < 1:
        raise UserError(f"--workers {workers} must be at least 1")
    record = arguments.record()
    if (out / MANIFEST_FILE).exists():
        return _complete(out, record, arguments, notice)
    tokenizer = None
    if (out / UNFINISHED_FILE).exists():
        unfinished, source = _resume(out, record, arguments)
        limits = replace(_limits(record), threshold=unfinished.threshold)
    else:
        _check_empty(out)
        source = _open(arguments, None)
        limits = with_threshold(source, _limits(record))
        tokenizer = _make_tokenizer(arguments, source, limits, notice)
        unfinished = Unfinished(
            arguments=record,
            fingerprint=source.fingerprint,
            revision=source.revision or "",
            threshold=limits.threshold,
            tokenizer_hash=tokenizer.content_hash,
        )
        _make_folder(out)
    with _locked(out):
        if not (out / UNFINISHED_FILE).exists():
            unfinished.save(out)  # first of all, as it makes the folder ours: what is missing can be made again
        if not (out / TOKENIZER_FILE).exists():
            (tokenizer or _make_tokenizer(arguments, source, limits, notice)).save(out / TOKENIZER_FILE)
        return _Preparation(out, source, unfinished, limits, workers, progress, notice).run()


class _Preparation:
    """The work that is left, from the last good checkpoint to the manifest."""

    def __init__(
        self,
        out: Path,
        source: Source,
        unfinished: Unfinished,
        limits: Limits,
        workers: int,
        progress: Report | None,
        notice: Callable[[str], None],
    ) -> None:
        self._out, self._source, self._limits = out, source, limits
        self._workers, self._progress = workers, progress
        self._tokenizer = Tokenizer.load(out / TOKENIZER_FILE)
        if self._tokenizer.content_hash != unfinished.tokenizer_hash:
            raise UserError(f"{out / TOKENIZER_FILE} is damaged; delete {out} and prepare it anew")
        remove_leftovers(out)
        kept, damage = verified(unfinished.checkpoints, out)
        if damage:
            notice(f"{damage}; making it again from there")
        if unfinished.checkpoints:
            notice(f"going on after {len(kept)} finished shards")
        self._unfinished = replace(unfinished, checkpoints=kept)
        self._shard: ShardWriter | None = None

    def run(self) -> Manifest:
        """Write what is left; return the manifest."""
        checkpoints = self._unfinished.checkpoints
        last = checkpoints[-1] if checkpoints else None
        # A copy: the counts go on, the checkpoint stays.
        self._totals = replace(last.totals, dropped=dict(last.totals.dropped)) if last else Totals()
        self._held_out = HeldOutWriter(self._out, last.held_out_size if last else 0)
        selected = select(self._source.read(last.cursor if last else None), self._limits, self._totals)
        self._report()
        try:
            for batch, encoded in encode_batches(batches(selected), self._out / TOKENIZER_FILE, self._workers):
                tokens = iter(encoded)
                for item in batch.items:
                    self._take(item, tokens)
                self._report()
            self._finish_shard(Cursor(len(self._source.parts)))
            held_out_sha256 = self._held_out.flush()
        finally:
            self._held_out.close()
            if self._shard is not None:
                self._shard.discard()
        return self._write_manifest(held_out_sha256)

    def _report(self) -> None:
        if self._progress is not None:
            expected = [size for size in (self._source.n_bytes, self._limits.max_bytes) if size is not None]
            self._progress(self._totals, min(expected, default=None))

    def _take(self, item: Selected, tokens: Iterator[np.ndarray]) -> None:
        """Count one record and write it where it belongs."""
        totals, record = self._totals, item.record
        if record.text is None:
            totals.dropped[record.reason] = totals.dropped.get(record.reason, 0) + 1
            return
        if item.held_out:
            self._held_out.add(record.name, record.text)
            totals.held_out_documents += 1
            totals.held_out_bytes += item.n_bytes
        else:
            document = next(tokens)
            most = self._unfinished.arguments["shard_tokens"]
            if self._shard is not None and self._shard.tokens + len(document) > most:
                self._finish_shard(record.cursor)
            if self._shard is None:
                self._shard = ShardWriter(self._out, len(self._unfinished.checkpoints))
            self._shard.add(document, item.n_bytes)
            totals.documents += 1
            totals.tokens += len(document)
            totals.bytes += item.n_bytes
        totals.long_lines += has_long_line(record.text)

    def _finish_shard(self, following: Cursor) -> None:
        """Make the current shard appear, then note that it is there and where the next one begins."""
        if self._shard is None:
            return
        held_out_sha256 = self._held_out.flush()
        checkpoint = Checkpoint(
            shard=self._shard.finish(),
            cursor=following,
            totals=replace(self._totals, dropped=dict(self._totals.dropped)),
            held_out_size=self._held_out.size,
            held_out_sha256=held_out_sha256,
        )
        self._shard = None
        self._unfinished = replace(self._unfinished, checkpoints=(*self._unfinished.checkpoints, checkpoint))
        self._unfinished.save(self._out)

    def _write_manifest(self, held_out_sha256: str) -> Manifest:
        totals = self._totals
        totals.dropped = dict(sorted(totals.dropped.items()))
        manifest = Manifest(
            version=FORMAT_VERSION,
            dtype=token_dtype(self._tokenizer.vocab_size).name,
            vocab_size=self._tokenizer.vocab_size,
            bos_id=self._tokenizer.bos_id,
            tokenizer_hash=self._tokenizer.content_hash,
            tokenizer_sha256=digest_of_file(self._out / TOKENIZER_FILE).hexdigest(),
            held_out_sha256=held_out_sha256,
            source=self._source.description,
            fingerprint=self._source.fingerprint,
            arguments=self._unfinished.arguments,
            totals=totals,
            shards=tuple(checkpoint.shard for checkpoint in self._unfinished.checkpoints),
        )
        if totals.dropped:
            logger.warning("%s: dropped documents: %s", manifest.source, describe_dropped(totals.dropped))
        if totals.long_lines:
            logger.warning("%s: %d documents with a line of 1 MB or more (kept)", manifest.source, totals.long_lines)
        write_atomically(self._out / MANIFEST_FILE, manifest.to_json().encode())
        (self._out / UNFINISHED_FILE).unlink()
        return manifest


def _resume(out: Path, record: dict[str, Any], arguments: Arguments) -> tuple[Unfinished, Source]:
    """What an interrupted preparation has left, and the source it was reading, if both are as they were."""
    unfinished = Unfinished.load(out)
    _check_same(out, record, unfinished.arguments)
    source = _open(arguments, unfinished.revision or None)
    if source.fingerprint != unfinished.fingerprint:
        raise _changed(out, source)
    return unfinished, source


def _complete(out: Path, record: dict[str, Any], arguments: Arguments, notice: Callable[[str], None]) -> Manifest:
    """The manifest of a folder that needs no more work, if it is what the arguments would make."""
    manifest = open_shards(out).manifest
    _check_same(out, record, manifest.arguments)
    # A commit of a data set does not change, so the hub need not be asked.
    if not arguments.source.startswith(HUB_PREFIX):
        source = _open(arguments, None)
        if source.fingerprint != manifest.fingerprint:
            raise _changed(out, source)
    (out / UNFINISHED_FILE).unlink(missing_ok=True)
    remove_leftovers(out)
    notice(f"{out} is complete already")
    return manifest


def _open(arguments: Arguments, revision: str | None) -> Source:
    return open_source(arguments.source, arguments.column, arguments.subset, arguments.split, revision)


def _limits(record: Mapping[str, Any]) -> Limits:
    return Limits(record["max_documents"], record["max_bytes"], record["held_out_bytes"])


def _make_tokenizer(arguments: Arguments, source: Source, limits: Limits, notice: Callable[[str], None]) -> Tokenizer:
    """Read the tokenizer, or train one on the first text that is not held out."""
    if arguments.tokenizer is not None:
        return Tokenizer.load(arguments.tokenizer)
    vocab_size = arguments.vocab_size or DEFAULT_VOCAB_SIZE
    notice(f"training a tokenizer of {vocab_size:,} ids on up to {arguments.tokenizer_bytes / 1e6:,.0f} MB of text")

    def texts() -> Iterator[str]:
        left = arguments.tokenizer_bytes
        for item in select(source.read(), limits):
            if item.record.text is None or item.held_out:
                continue
            yield item.record.text
            left -= item.n_bytes
            if left <= 0:
                return

    return train_tokenizer(texts(), vocab_size)


def _check_empty(out: Path) -> None:
    """Refuse a folder with files in it, but for what a crash leaves before the first file is whole."""
    if not out.exists():
        return
    if not out.is_dir() or any(not path.name.startswith(f".{UNFINISHED_FILE}") for path in out.iterdir()):
        raise UserError(f"{out} holds files that nagnet data prepare did not write; name a new or empty folder")


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make folder {out}: {error.strerror}; name another one") from error


def _check_same(out: Path, now: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    different = [
        f"{name} {before.get(name)!r}, now {value!r}" for name, value in now.items() if before.get(name) != value
    ]
    if different:
        raise UserError(
            f"{out} was begun with other arguments ({'; '.join(different)}); name a new folder, or delete it first"
        )


def _changed(out: Path, source: Source) -> UserError:
    return UserError(
        f"{source.description} has changed since {out} was begun; name a new folder, or delete it and prepare anew"
    )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep a second preparation out of a folder; the lock ends with the process, however that ends."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{folder} is being prepared by another process; wait for it, or name a new one") from error
        yield
    finally:
        os.close(descriptor)
