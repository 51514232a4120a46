"""Which documents of a source are kept, and which of them are held out, decided as they stream by."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from nagnet.data.corpus import HELD_OUT_FRACTION, name_hash
from nagnet.data.manifest import Totals
from nagnet.data.sources import Record, Source
from nagnet.errors import UserError

# The first documents are looked at before any is written, so that one of them at least is held out.
_DOCUMENTS_LOOKED_AT = 1_000

_BATCH_RECORDS = 256
_BATCH_BYTES = 250_000


@dataclass(frozen=True)
class Limits:
    """How much is taken.

    Attributes:
        max_documents: Most documents kept; None for all.
        max_bytes: Most UTF-8 bytes of text kept; None for all.
        held_out_bytes: Most of them that are held out, more only where the first held-out document is longer.
        threshold: Documents whose ``name_hash`` is below it are held out.
    """

    max_documents: int | None
    max_bytes: int | None
    held_out_bytes: int
    threshold: int = 0


class Selected(NamedTuple):
    """A record and what becomes of it; dropped where it has no text.

    Attributes:
        record: The record.
        n_bytes: UTF-8 bytes of its text.
        held_out: Whether it is for evaluation.
    """

    record: Record
    n_bytes: int
    held_out: bool


class SelectedBatch(NamedTuple):
    """Consecutive records.

    Attributes:
        items: The records.
        texts: Texts of those which are for training.
    """

    items: Sequence[Selected]
    texts: Sequence[str]


def select(records: Iterable[Record], limits: Limits, so_far: Totals | None = None) -> Iterator[Selected]:
    """Mark records, in order, until a limit is reached.

    Args:
        records: Records of a source.
        limits: The limits.
        so_far: Counts of the records before these.
    """
    totals = so_far or Totals()
    documents, n_bytes, held_out_bytes = totals.kept_documents, totals.kept_bytes, totals.held_out_bytes
    for record in records:
        if limits.max_documents is not None and documents >= limits.max_documents:
            return
        if record.text is None:
            yield Selected(record, 0, False)
            continue
        size = len(record.text.encode())
        if limits.max_bytes is not None and n_bytes + size > limits.max_bytes:
            return
        documents, n_bytes = documents + 1, n_bytes + size
        held_out = name_hash(record.name) < limits.threshold
        held_out = held_out and (held_out_bytes == 0 or held_out_bytes + size <= limits.held_out_bytes)
        if held_out:
            held_out_bytes += size
        yield Selected(record, size, held_out)


def with_threshold(source: Source, limits: Limits) -> Limits:
    """Find the threshold which holds out as much as is wanted, spread over the source, and no more than 5 %.

    The rule is that of ``split_documents``, so a source which both can read is split alike. Of the first
    1,000 documents at least one is held out and, if there are more than one, at least one is not.

    Args:
        source: Its first documents are read.
        limits: What is wanted.

    Returns:
        The limits with a threshold.

    Raises:
        UserError: If the source holds no document, or one only.
    """
    hashes: list[int] = []
    dropped: Counter[str] = Counter()
    for item in select(source.read(), limits):
        if item.record.text is None:
            dropped[item.record.reason] += 1
            continue
        hashes.append(name_hash(item.record.name))
        if len(hashes) == _DOCUMENTS_LOOKED_AT:
            break
    if not hashes:
        raise UserError(
            f"{source.description} holds no text documents within the limits "
            f"(dropped: {describe_dropped(dropped) or 'none'})"
        )
    if limits.held_out_bytes == 0:
        return limits
    if len(hashes) == 1:
        raise UserError(
            f"{source.description} holds one document only, so none can be held out; give more text, or "
            "--held-out-bytes 0 to hold out none"
        )
    hashes.sort()
    known = [size for size in (source.n_bytes, limits.max_bytes) if size is not None]
    share = min(HELD_OUT_FRACTION, limits.held_out_bytes / max(1, min(known))) if known else HELD_OUT_FRACTION
    return replace(limits, threshold=min(max(int(share * 2**64), hashes[0] + 1), hashes[-1]))


def describe_dropped(dropped: Mapping[str, int]) -> str:
    """Say how many documents were dropped and why; empty where none were."""
    return ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))


def batches(items: Iterable[Selected]) -> Iterator[SelectedBatch]:
    """Group records for encoding: so many, or about so many bytes of text."""
    group: list[Selected] = []
    size = 0
    for item in items:
        group.append(item)
        size += item.n_bytes
        if len(group) == _BATCH_RECORDS or size >= _BATCH_BYTES:
            yield _batch(group)
            group, size = [], 0
    if group:
        yield _batch(group)


def _batch(items: Sequence[Selected]) -> SelectedBatch:
    texts = [item.record.text for item in items if item.record.text is not None and not item.held_out]
    return SelectedBatch(items, texts)
