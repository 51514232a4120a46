"""The text of a run: tokens to train on, held-out documents to score, and the tokenizer between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nagnet.data.corpus import Corpus, Document, read_corpus, read_documents, standard_library_corpus
from nagnet.data.loader import BatchLoader, TokenSource, encode_documents
from nagnet.data.manifest import MANIFEST_FILE, UNFINISHED_FILE
from nagnet.data.shards import held_out_documents, open_shards, prepared_tokenizer
from nagnet.data.sources import HUB_PREFIX
from nagnet.data.tokenizer import Tokenizer, cached_tokenizer
from nagnet.errors import UserError
from nagnet.evaluation.bits_per_byte import documents_within
from nagnet.evaluation.saved_model import find_model
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
        """This process's share of every batch.

        Raises:
            UserError: if the model that the run starts from had another tokenizer.
        """
        if config.init_from is not None:
            tokenizer = find_model(config.init_from).tokenizer(config.model.vocab_size)
            if tokenizer.content_hash != self.tokenizer.content_hash:
                raise UserError(
                    f"{config.init_from} had another tokenizer than {self.source}; train on the text it had"
                )
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
    if data is not None and _is_prepared(data):
        tokens: TokenSource = open_shards(data)
        tokenizer, held_out, source = prepared_tokenizer(data), held_out_documents(data), str(Path(data))
    else:
        corpus = _corpus(data)
        tokenizer = cached_tokenizer(corpus, vocab_size)
        tokens = encode_documents(corpus.train, tokenizer, cache_dir=default_cache_dir())
        held_out, source = corpus.held_out, corpus.source
    if tokenizer.vocab_size != vocab_size:
        raise UserError(
            f"{source}: its tokenizer has {tokenizer.vocab_size} ids, the model {vocab_size}; set "
            f"model.vocab_size={tokenizer.vocab_size}"
        )
    return RunText(tokens, tokenizer, _within(held_out, eval_bytes, source), source)


def text_to_score(data: str | None, max_bytes: int | None, whole: bool = False) -> tuple[Sequence[Document], str]:
    """The documents that an evaluation scores, without reading or making tokens of the others.

    Args:
        data: None for Python's standard library, a prepared folder, or a file or folder of text; of each the part that
            training on it holds out.
        max_bytes: of whole documents, chosen by the hash of their names; None for all.
        whole: take all documents of a file or folder of text, which then must not have been trained on.

    Returns:
        The documents, and where they come from, in words.

    Raises:
        UserError: for text that must be prepared first, or nothing to score.
    """
    if data is not None and data.startswith(HUB_PREFIX):
        raise UserError(f"{data} must be prepared first: nagnet data prepare {data} FOLDER, then --data FOLDER")
    prepared = data is not None and _is_prepared(data)
    if whole and (data is None or prepared):
        raise UserError("--whole scores all of a file or folder of text; name one with --data")
    if whole:
        documents, source = read_documents(str(data)), f"all of {data}"
    elif data is not None and prepared:
        documents, source = held_out_documents(data), f"held out of {data}"
    else:
        corpus = _corpus(data)
        documents, source = corpus.held_out, f"held out of {corpus.source}"
    return documents if max_bytes is None else _within(documents, max_bytes, source), source


def _is_prepared(data: str) -> bool:
    return any((Path(data) / name).exists() for name in (MANIFEST_FILE, UNFINISHED_FILE))


def _corpus(data: str | None) -> Corpus:
    return standard_library_corpus() if data is None else read_corpus(data)


def _within(documents: Sequence[Document], max_bytes: int, source: str) -> list[Document]:
    scored = documents_within(documents, max_bytes)
    if not scored:
        raise UserError(f"{source}: no document is held out to score; give more text")
    return scored
