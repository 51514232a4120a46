"""The text of a run: tokens to train on, held-out documents to score, and the tokenizer between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nagnet.data.corpus import Document, read_corpus, standard_library_corpus
from nagnet.data.loader import BatchLoader, TokenSource, encode_documents
from nagnet.data.manifest import MANIFEST_FILE, UNFINISHED_FILE
from nagnet.data.shards import held_out_documents, open_shards, prepared_tokenizer
from nagnet.data.sources import HUB_PREFIX
from nagnet.data.tokenizer import Tokenizer, cached_tokenizer
from nagnet.errors import UserError
from nagnet.evaluation.bits_per_byte import documents_within
from nagnet.files import default_cache_dir
from nagnet.training.config import RunConfig
from nagnet.training.distributed import World


@dataclass(frozen=True)
class RunText:
    """What a run reads.

    Attributes:
        tokens: to train on. tokenizer: that made them.
        held_out: whole documents to score, ``eval_bytes`` of the recipe at most (but at least one).
        source: where the text comes from, in words.
    """

    tokens: TokenSource
    tokenizer: Tokenizer
    held_out: Sequence[Document]
    source: str

    def loader(self, config: RunConfig, world: World) -> BatchLoader:
        """This process's share of every batch."""
        share = config.sequences_per_process(world.size)
        return BatchLoader(self.tokens, share, config.seq_len, config.seed, world.rank, world.size)


def open_text(data: str | None, vocab_size: int, eval_bytes: int) -> RunText:
    """Opens the text of a run; small corpora are encoded now, with a cache, and prepared folders mapped.

    Args:
        data: None for Python's standard library, a prepared folder, or a file or folder of text.
        vocab_size: of the model. A tokenizer is trained to it where the text has none.
        eval_bytes: held-out text to score, in bytes.

    Raises:
        UserError: for text that must be prepared first, a tokenizer that does not fit, or nothing to score.
    """
    if data is not None and data.startswith(HUB_PREFIX):
        raise UserError(
            f"{data} must be prepared first: nagnet data prepare {data} FOLDER --vocab-size {vocab_size}, then train "
            "with --data FOLDER"
        )
    folder = None if data is None else Path(data)
    if folder is not None and any((folder / name).exists() for name in (MANIFEST_FILE, UNFINISHED_FILE)):
        tokens: TokenSource = open_shards(folder)
        tokenizer, held_out, source = prepared_tokenizer(folder), held_out_documents(folder), str(folder)
    else:
        corpus = standard_library_corpus() if folder is None else read_corpus(folder)
        tokenizer = cached_tokenizer(corpus, vocab_size)
        tokens = encode_documents(corpus.train, tokenizer, cache_dir=default_cache_dir())
        held_out, source = corpus.held_out, corpus.source
    if tokenizer.vocab_size != vocab_size:
        raise UserError(
            f"{source}: its tokenizer has {tokenizer.vocab_size} ids, the model {vocab_size}; set "
            f"model.vocab_size={tokenizer.vocab_size}"
        )
    scored = documents_within(held_out, eval_bytes)
    if not scored:
        raise UserError(f"{source}: no document is held out to score; give more text")
    return RunText(tokens, tokenizer, scored, source)
