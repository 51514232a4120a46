"""Keys and values of earlier tokens, so that a further token costs one position and not the whole text again.

A cached pass is the uncached one, position by position (`tests/generation/test_cache.py` holds it to that in
float64). Sequences of a batch may differ in length: each stands at positions of its own and sees itself alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nagnet.errors import UserError
from nagnet.models.decoder import Decoder
from nagnet.nn.attention import LayerPast, Past
from nagnet.typing import Bool, Int

PREFILL_CHUNK = 512  # tokens a pass: a larger mask costs memory, a smaller one reads all weights more often


class KeyValueCache:
    """Room for the keys and values of a batch in every layer, allocated once.

    Slot and position are the same: a sequence fills its slots from 0. Layers with a sliding window keep all positions
    too, but read those inside the window alone.

    Args:
        model: gives shapes, type and device. batch_size: B, sequences. capacity: positions for each.

    Attributes:
        lengths: tokens of each sequence so far, B numbers. device, dtype: of keys and values.
        compiled_step: what `decode_compiled` keeps for it.
    """

    def __init__(self, model: Decoder, batch_size: int, capacity: int):
        if batch_size < 1 or capacity < 1:
            raise UserError(f"a cache for {batch_size} sequences of {capacity} tokens; both must be 1 or more")
        config = model.config
        weight = next(model.blocks.parameters())
        self.capacity = capacity
        self.device, self.dtype = weight.device, weight.dtype
        windows = config.sliding_windows or (0,)
        self._windows = [windows[layer % len(windows)] for layer in range(config.n_layers)]
        # One more slot than positions, which padding is written to (LayerPast).
        shape = (2, batch_size, config.n_kv_heads, capacity + 1, config.head_dim)
        self._layers = [torch.zeros(shape, dtype=self.dtype, device=self.device).unbind() for _ in self._windows]
        self._is_token = torch.ones(1, 1, dtype=torch.bool, device=self.device)
        self.lengths = [0] * batch_size
        self.compiled_step: Any = None

    def reset(self) -> None:
        """Forgets all sequences; the next ones start from position 0."""
        self.lengths = [0] * len(self.lengths)
        for keys, values in self._layers:  # hidden slots are multiplied by 0, which a NaN would survive
            keys.zero_()
            values.zero_()

    def bytes_read(self) -> int:
        """Bytes of keys and values that the next token of every sequence will read, its own included."""
        per_slot = 2 * self._layers[0][0][0, :, 0].nbytes
        return per_slot * sum(
            min(length + 1, window or length + 1) for length in self.lengths for window in self._windows
        )

    def past(self, counts: Sequence[int], width: int) -> Past:
        """Where the next tokens go.

        Args:
            counts: tokens to come of each sequence, 0..width, at the left of their row; the rest of it is padding.
            width: T, columns of the pass.

        Raises:
            UserError: if a sequence would outgrow the capacity.
        """
        ends = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        end = max(ends)
        if end > self.capacity:
            raise UserError(f"{end} tokens do not fit a cache of {self.capacity}; make it with a larger capacity")
        alone = width == len(counts) == 1
        positions, slots, is_token = self._places(ends, width)
        lowest = min(min(length, stop - 1) for length, stop in zip(self.lengths, ends, strict=True))
        seen = {}
        for window in set(self._windows):
            first = max(0, lowest - window + 1) if window else 0
            ruler = torch.empty(first + 1, end - first + 1, 0, device=self.device)
            seen[window] = ruler, None if alone else _allowed(positions, first, end, window)
        layers = [
            LayerPast(keys, values, slots, *seen[window])
            for (keys, values), window in zip(self._layers, self._windows, strict=True)
        ]
        return Past(positions, end, layers, is_token)

    def _places(
        self, ends: Sequence[int], width: int
    ) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"], Bool[Tensor, "b t"]]:
        """Of the columns of a pass: their positions, the slots that they are written to, and which are tokens.

        In plain numbers: of a step of one token, each operation on tensors would take longer than all of this.
        """
        if width == len(ends) == 1 and self.lengths[0] < ends[0]:
            position = torch.full((1, 1), self.lengths[0], device=self.device)  # `torch.tensor` takes thrice as long
            return position, position, self._is_token
        rows = [
            [(start + column, stop) for column in range(width)] for start, stop in zip(self.lengths, ends, strict=True)
        ]
        # Padding stands where the last token does: what it computes is dropped, but must be finite.
        positions = [[max(0, min(place, stop - 1)) for place, stop in row] for row in rows]
        slots = [[place if place < stop else self.capacity for place, stop in row] for row in rows]
        placed = torch.tensor(positions).to(self.device), torch.tensor(slots).to(self.device)
        return *placed, placed[1] < self.capacity

    def advance(self, counts: Sequence[int]) -> None:
        """Counts the tokens of a pass that has been made."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]


def _allowed(positions: Tensor, first: int, end: int, window: int) -> Tensor:
    """Bool [B, 1, T, end - first]: which of the positions ``first .. end - 1`` each token sees."""
    distance = positions.unsqueeze(-1) - torch.arange(first, end, device=positions.device)
    seen = distance >= 0
    return (seen & (distance < window) if window else seen).unsqueeze(1)


def extend(
    model: Decoder,
    cache: KeyValueCache,
    tokens: Int[Tensor, "b t"],
    counts: Sequence[int] | None = None,
) -> Any:
    """Runs the blocks on further tokens of the cached sequences.

    Args:
        tokens: [B, T]. counts: how many of each row are tokens, from the left; the rest is padding. None: all.

    Returns:
        The state of the stream [B, T] after the last update, as `Decoder.trunk`; rows of padding mean nothing.

    Raises:
        UserError: if the cache is full.
    """
    counts = [tokens.shape[1]] * tokens.shape[0] if counts is None else counts
    state = model.trunk(tokens, past=cache.past(counts, tokens.shape[1]))
    cache.advance(counts)
    return state


class Prompted(NamedTuple):
    """What a prompt leaves behind.

    Attributes:
        direction, log_norm: of each sequence's last token, [B, d] and [B].
        log_norms: of all tokens, [B, T]; of padding, anything.
    """

    direction: Tensor
    log_norm: Tensor
    log_norms: Tensor


def prefill(
    model: Decoder, cache: KeyValueCache, sequences: Sequence[Sequence[int]], chunk: int = PREFILL_CHUNK
) -> Prompted:
    """Runs prompts of any lengths through the model, ``chunk`` tokens of each in a pass.

    Args:
        sequences: B lists of at least one token.

    Raises:
        UserError: if the cache is too small.
    """
    lengths = [len(sequence) for sequence in sequences]
    tokens = torch.zeros(len(sequences), max(lengths), dtype=torch.long)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = torch.as_tensor(sequence)
    last_direction, last_log_norm, log_norms = None, None, []
    for start in range(0, max(lengths), chunk):
        part = tokens[:, start : start + chunk].to(cache.device)
        counts = [min(max(length - start, 0), part.shape[1]) for length in lengths]
        direction, log_norm = extend(model, cache, part, counts).split()
        rows = torch.arange(len(lengths), device=cache.device)
        columns = torch.tensor(counts, device=cache.device) - 1
        found_direction, found_log_norm = direction[rows, columns], log_norm[rows, columns]
        if last_direction is None or last_log_norm is None:
            last_direction, last_log_norm = found_direction, found_log_norm
        else:  # a sequence without tokens here ended in an earlier chunk
            ends_later = columns >= 0
            last_direction = torch.where(ends_later.unsqueeze(1), found_direction, last_direction)
            last_log_norm = torch.where(ends_later, found_log_norm, last_log_norm)
        log_norms.append(log_norm)
    assert last_direction is not None and last_log_norm is not None
    return Prompted(last_direction, last_log_norm, torch.cat(log_norms, dim=1))
