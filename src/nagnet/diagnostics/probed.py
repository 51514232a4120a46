"""What a probe looks at: a model, the same text for every model, and what its run wrote down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nagnet.data.loader import BatchLoader, PackedTokens
from nagnet.errors import UserError

PROBE_DOCUMENTS = 24
PROBE_LENGTH = 64
SINK_ROWS = 128
SCORED_ROWS = 48


@dataclass(frozen=True)
class ProbeText:
    """The text of a probe, as the tokens of one model.

    Attributes:
        tokens: int64 [at most 24, at most 64], the evaluation rows. sink_tokens: [at most 128, at most 64].
        scored: inputs and targets [1, T] of longer rows, on which predictions are judged.
        occurrences: of each id in all of the text, int64 [V].
    """

    tokens: Tensor
    sink_tokens: Tensor
    scored: Sequence[tuple[Tensor, Tensor]]
    occurrences: Tensor


@dataclass(frozen=True)
class ProbedModel:
    """One model of a probe.

    Attributes:
        model: a `nagnet.Decoder` on its device.
        text: cut with its own tokenizer.
        history: rows of the metrics of its run, in order; empty where it is not known.
    """

    model: Any
    text: ProbeText
    history: Sequence[Mapping[str, Any]] = ()


def cut_text(packed: PackedTokens, seq_len: int, device: torch.device) -> ProbeText:
    """Cuts encoded documents for a probe.

    Args:
        packed: the documents, each with BOS in front. seq_len: tokens of a scored row.

    Raises:
        UserError: if the text has fewer than 2 tokens.
    """
    occurrences = np.bincount(packed.tokens, minlength=packed.vocab_size)
    return ProbeText(
        tokens=probe_tokens(packed).to(device),
        sink_tokens=probe_tokens(packed, SINK_ROWS).to(device),
        scored=scored_rows(packed, seq_len, device),
        occurrences=torch.from_numpy(occurrences),
    )


def probe_tokens(packed: PackedTokens, rows: int = PROBE_DOCUMENTS, length: int = PROBE_LENGTH) -> Tensor:
    """The first documents that are long enough, BOS in front, cut to ``length`` tokens.

    Where there are too few documents, later parts of them follow, each with BOS in front; where none is that long, the
    length of the longest takes its place.

    Returns:
        int64 [at most ``rows``, at most ``length``].
    """
    sizes = packed.offsets[1:] - packed.offsets[:-1]
    length = min(length, int(sizes.max(initial=0)))
    if length < 1:
        raise UserError("the text has no tokens to look at")
    cut, part = [], 0
    while len(cut) < rows:
        start = part * (length - 1)  # of a part: its first token is one of the document's, or BOS
        whole = [int(a) + start for a, n in zip(packed.offsets, sizes, strict=False) if n >= start + length]
        if not whole or (part and length == 1):
            break
        cut += [packed.tokens[a : a + length].astype(np.int64) for a in whole[: rows - len(cut)]]
        part += 1
    tokens = torch.from_numpy(np.stack(cut))
    tokens[:, 0] = packed.bos_id
    return tokens


def scored_rows(
    packed: PackedTokens, seq_len: int, device: torch.device, rows: int = SCORED_ROWS
) -> list[tuple[Tensor, Tensor]]:
    """Rows of the text, inputs and targets [1, T], on which predictions are judged; the same for models that share ids.

    Raises:
        UserError: if the text has fewer than 2 tokens.
    """
    loader = BatchLoader(packed, 1, max(1, min(seq_len, packed.n_tokens - 1)), seed=0)
    batches = [loader.batch(step) for step in range(min(rows, loader.rows_per_epoch))]
    return [(inputs.to(device), targets.to(device)) for inputs, targets in batches]
