"""A saved model opened for evaluation: on its device, found causal, with its tokenizer and the text of its run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from nagnet.data.corpus import Document
from nagnet.data.tokenizer import Tokenizer
from nagnet.diagnostics.probe import measuring
from nagnet.errors import UserError
from nagnet.evaluation.bits_per_byte import DocumentScores, Score
from nagnet.evaluation.causality import check_causality
from nagnet.evaluation.frozen_scale import check_scale_is_used, final_log_norm
from nagnet.evaluation.saved_model import SavedModel, find_model
from nagnet.models.checkpoint import load_model
from nagnet.models.decoder import Decoder
from nagnet.models.flops import SkipRates, skip_rates
from nagnet.nn.skip import run_rates
from nagnet.training.config import RunConfig
from nagnet.training.distributed import World, sum_over_ranks
from nagnet.training.scoring import ROWS, losses_of, score_documents
from nagnet.training.text import text_to_score

GATE_TOKENS = 1024  # longest sequence on which causality is tested


@dataclass(frozen=True)
class EvaluatedModel:
    """What `open_model` returns.

    Attributes:
        model: in the number type asked for. saved: where it was found.
        tokenizer: the model's.
        run: config of the run that made it, or None.
        seq_len: most tokens it is shown at a time when text is scored.
        device: of the model. world: processes that score together.
    """

    model: Decoder
    saved: SavedModel
    tokenizer: Tokenizer
    run: RunConfig | None
    seq_len: int
    device: torch.device
    world: World

    def text(self, data: str | None, max_bytes: int | None, whole: bool = False) -> tuple[Sequence[Document], str]:
        """Documents to score, and their source in words; arguments as `text_to_score`, but None is the run's own.

        Raises:
            UserError: if neither the run nor ``data`` says where text is, there is none, or ``max_bytes`` is below 1.
        """
        if data is None and self.run is None:
            raise UserError(f"{self.saved.folder} does not say what it was trained on; name text with --data")
        if max_bytes is not None and max_bytes < 1:
            raise UserError(f"max_bytes is {max_bytes}; give 1 or more")
        if self.run is not None and not whole:
            data, max_bytes = data or self.run.data, max_bytes or self.run.eval_bytes
        return text_to_score(data, max_bytes, whole)

    def score(
        self,
        documents: Sequence[Document],
        score: Score | None = None,
        batch_size: int = ROWS,
        progress: Callable[[int, int], None] | None = None,
    ) -> DocumentScores:
        """Scores documents by the model's loss, or what ``score`` says; every process must call this."""
        function = score or losses_of(self.model)
        if self.model.skipping is not None:
            self.model.skipping.forget()
        return score_documents(
            self.model,
            function,
            documents,
            self.tokenizer,
            self.seq_len,
            self.device,
            self.world,
            batch_size,
            progress,
        )

    def skip_rates(self) -> SkipRates | None:
        """What the model skipped of the documents scored last, in all processes; None where it does not skip."""
        skipping = self.model.skipping
        if skipping is None:
            return None
        return skip_rates(self.model.config, run_rates(sum_over_ranks(skipping.counts)), self.seq_len)

    def mean_log_norm(
        self,
        documents: Sequence[Document],
        batch_size: int = ROWS,
        progress: Callable[[int, int], None] | None = None,
    ) -> float:
        """Mean of s_N over all positions that predict a token of the documents."""
        sums = self.score(documents, final_log_norm(self.model), batch_size, progress)
        return float(sums.nats.sum() / sums.n_tokens.sum())


def open_model(
    checkpoint: str | Path,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    world: World | None = None,
    tokenizer_file: Path | None = None,
    seq_len: int | None = None,
    freezable: bool = False,
    skip_threshold: float | None = None,
) -> EvaluatedModel:
    """Opens a model for evaluation.

    Args:
        checkpoint: as for `find_model`.
        tokenizer_file: where the model has none beside it, or another is wanted.
        seq_len: default: the run's, or the model's max_seq_len.
        freezable: whether its token-dependent scale is going to be frozen.
        skip_threshold: for `Decoder.set_skip_threshold`; None: as the model was trained.

    Raises:
        UserError: if there is no model, it is damaged or not causal, its tokenizer is missing, or it has no scale to
            freeze.
    """
    if seq_len is not None and seq_len < 1:
        raise UserError(f"seq_len is {seq_len}; give 1 or more")
    saved = find_model(checkpoint)
    model = load_model(saved.folder).to(device, dtype)
    if skip_threshold is not None:
        model.set_skip_threshold(skip_threshold)
    if freezable:
        check_scale_is_used(model)
    tokenizer = saved.tokenizer(model.config.vocab_size, tokenizer_file)
    run = None if saved.run_config is None else RunConfig.from_dict(saved.run_config)
    length = seq_len or (model.config.max_seq_len if run is None else run.seq_len)
    with measuring(model):
        check_causality(model, model.config.vocab_size, min(length, GATE_TOKENS), device)
    return EvaluatedModel(model, saved, tokenizer, run, length, device, world or World())
