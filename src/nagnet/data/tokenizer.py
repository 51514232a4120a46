"""A byte-level BPE tokenizer that encodes any text and never mistakes text for a special token."""

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from nagnet.data.corpus import Corpus, hash_documents
from nagnet.errors import UserError
from nagnet.files import default_cache_dir, write_atomically

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

logger = logging.getLogger(__name__)

# The vocabulary entry that stands for "beginning of document". It is an ordinary entry of the BPE vocabulary
# that no merge leads to, not an "added token" of the tokenizers library (those are searched for in every
# text). Its name has spaces, which the byte-level alphabet writes as another character, so no text can spell
# it either.
BOS_NAME = "<| bos |>"
N_BYTES = 256
ALGORITHM_VERSION = 1  # part of the cache key: raise it when training gives other tokens for the same text

_CHECKSUM_BYTES = 32

# Words with one leading character, numbers of one or two digits, punctuation, and white space, as in GPT-4.
# Two digits instead of three keep a small vocabulary from filling with numbers. Every run is bounded, since
# BPE training takes time quadratic in the longest run: a 1 MB line of one letter would never finish.
_LONGEST_RUN = 256
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}{1,RUN}|\p{N}{1,2}| ?[^\s\p{L}\p{N}]{1,RUN}[\r\n]{0,RUN}"
    r"|\s{0,RUN}[\r\n]|\s{1,RUN}(?!\S)|\s{1,RUN}"
).replace("RUN", str(_LONGEST_RUN))

# The byte-level alphabet of GPT-2: printable bytes of Latin-1 stand for themselves, the others follow from U+0100.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(N_BYTES) if byte not in _PRINTABLE)
_BYTE_OF_SYMBOL = {chr(byte): byte for byte in _PRINTABLE} | {chr(N_BYTES + i): byte for i, byte in enumerate(_OTHERS)}


class Tokenizer:
    """Text to token ids and back, without loss.

    Attributes:
        bos_id: Id that begins every document; the last id of the vocabulary.
        vocab_size: Number of ids, ``bos_id`` included.
    """

    def __init__(self, backend: "Backend") -> None:
        """Wrap a byte-level BPE of the tokenizers library.

        Args:
            backend: Its vocabulary holds the 256 byte symbols and, as its last entry, ``BOS_NAME``.

        Raises:
            UserError: If the backend is not such a tokenizer.
        """
        vocabulary = backend.get_vocab()
        last = len(vocabulary) - 1
        symbols = set(_tokenizers().pre_tokenizers.ByteLevel.alphabet())
        problem = None
        if not symbols <= vocabulary.keys():
            problem = "the vocabulary lacks some of the 256 byte symbols"
        elif vocabulary.get(BOS_NAME) != last or max(vocabulary.values()) != last:
            problem = f"the last vocabulary entry is not {BOS_NAME!r}"
        elif backend.get_added_tokens_decoder():
            problem = "it has added tokens, which would be found inside ordinary text"
        elif backend.normalizer is not None:
            problem = "it normalises text, so decoding would not give the text back"
        if problem:
            raise UserError(f"not a nagnet tokenizer: {problem}; make one with train_tokenizer")
        self._backend = backend
        self.bos_id: int = vocabulary[BOS_NAME]
        self.vocab_size: int = len(vocabulary)

    def get_bos_token_id(self) -> int:
        """Return the id that begins every document."""
        return self.bos_id

    def encode(self, text: str) -> list[int]:
        """Encode one text, without a special token.

        Args:
            text: Any text, also one that looks like a special token.

        Returns:
            Token ids; ``decode`` gives the text back.

        Raises:
            UserError: If the text holds a lone surrogate, which UTF-8 cannot express.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode several texts in parallel; the same as ``encode`` on each of them."""
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise UserError(
                    f"text holds a lone surrogate at character {error.start}; "
                    "replace it, for example with text.encode('utf-8', 'replace').decode()"
                ) from error
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode token ids; special ids are skipped, broken UTF-8 sequences become U+FFFD.

        Raises:
            UserError: If an id is outside the vocabulary.
        """
        text_ids = []
        for token in ids:
            token = int(token)
            if not 0 <= token < self.vocab_size:
                raise UserError(
                    f"token id {token} is outside the vocabulary of {self.vocab_size}; "
                    "use the tokenizer the tokens were made with"
                )
            if token != self.bos_id:
                text_ids.append(token)
        return self._backend.decode(text_ids, skip_special_tokens=False)

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes of each token, int64 ``[vocab_size]``; 0 for special tokens.

        The sum over the tokens of a text is the length of the text in bytes.
        """
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        for symbols, token in self._backend.get_vocab().items():
            if token != self.bos_id:
                counts[token] = len(symbols)  # the byte-level alphabet writes each byte as one character
        return counts

    @cached_property
    def contents(self) -> list[bytes]:
        """The bytes that each id stands for, by id; none for special ids. Text is their sum, decoded as UTF-8."""
        contents = [b""] * self.vocab_size
        for symbols, token in self._backend.get_vocab().items():
            if token != self.bos_id:
                contents[token] = bytes(_BYTE_OF_SYMBOL[symbol] for symbol in symbols)
        return contents

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 (hex) of everything that decides how text is encoded."""
        canonical = json.dumps(json.loads(self._backend.to_str()), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def to_bytes(self) -> bytes:
        """Return the tokenizer as JSON, what ``save`` writes."""
        return self._backend.to_str().encode()

    @classmethod
    def from_bytes(cls, content: bytes, name: str | Path) -> "Tokenizer":
        """Read what ``to_bytes`` returned.

        Args:
            content: JSON.
            name: Where it comes from, for messages.

        Raises:
            UserError: If it is damaged, or of another kind of tokenizer.
        """
        try:
            backend = _tokenizers().Tokenizer.from_buffer(content)
        except UserError:
            raise
        except Exception as error:  # the library raises bare Exception for any malformed content
            raise UserError(f"tokenizer {name} is damaged ({error}); make it again") from error
        return cls(backend)

    def save(self, path: str | Path) -> None:
        """Write the tokenizer as one JSON file (``tokenizer.json``), all of it or nothing.

        Raises:
            UserError: If the file cannot be written.
        """
        try:
            write_atomically(Path(path), self.to_bytes())
        except OSError as error:
            raise UserError(f"cannot write tokenizer {path}: {error.strerror}; choose another folder") from error

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read what ``save`` wrote.

        Raises:
            UserError: If the file is missing, damaged, or of another kind of tokenizer.
        """
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise UserError(f"cannot read tokenizer {path}: {error.strerror}; check the path") from error
        return cls.from_bytes(content, path)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE; the same texts give the same tokenizer.

    Args:
        texts: Training texts.
        vocab_size: Number of ids wanted: 256 bytes, merges, and the beginning-of-document id.

    Returns:
        A tokenizer with exactly ``vocab_size`` ids.

    Raises:
        UserError: If ``vocab_size`` is below 257, or the texts hold too few repeated pairs to reach it.
    """
    if vocab_size < N_BYTES + 1:
        raise UserError(
            f"vocab_size {vocab_size} is too small; give at least {N_BYTES + 1} (256 bytes and one special)"
        )
    library = _tokenizers()
    backend = library.Tokenizer(library.models.BPE())
    backend.pre_tokenizer = library.pre_tokenizers.Sequence(
        [
            library.pre_tokenizers.Split(library.Regex(SPLIT_PATTERN), behavior="isolated"),
            library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=2,  # a pair seen once says nothing about other text
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    description = json.loads(backend.to_str())
    vocabulary = description["model"]["vocab"]
    reached = len(vocabulary) + 1
    if reached < vocab_size:
        raise UserError(
            f"the text supports a vocabulary of {reached} tokens, not {vocab_size}; "
            f"lower vocab_size to {reached} or give more text"
        )
    vocabulary[BOS_NAME] = len(vocabulary)
    return Tokenizer(library.Tokenizer.from_str(json.dumps(description)))


def cached_tokenizer(corpus: Corpus, vocab_size: int, cache_dir: str | Path | None = None) -> Tokenizer:
    """Train a tokenizer on the training part of a corpus, or read it from the cache.

    Args:
        corpus: Only its training documents are seen, so held-out text cannot shape the tokens.
        vocab_size: Number of ids wanted.
        cache_dir: Cache folder; ``$NAGNET_CACHE`` or ``~/.cache/nagnet`` if None. A folder that cannot be
            written costs only a warning.

    Returns:
        The tokenizer; a damaged cache file is replaced.

    Raises:
        UserError: As ``train_tokenizer``.
    """
    folder = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    key = f"{ALGORITHM_VERSION}:{vocab_size}:{hash_documents(corpus.train)}"
    path = folder / f"tokenizer-{hashlib.sha256(key.encode()).hexdigest()[:32]}.cache"
    if path.exists():
        try:
            return _read_cached(path)
        except UserError as error:
            logger.warning("%s; training it again", error)
    tokenizer = train_tokenizer((document.text for document in corpus.train), vocab_size)
    content = tokenizer.to_bytes()
    try:
        write_atomically(path, hashlib.sha256(content).digest() + content)
    except OSError as error:
        logger.warning("cannot write %s (%s); the tokenizer is not cached", path, error.strerror)
    return tokenizer


def _read_cached(path: Path) -> Tokenizer:
    """Read a cache file: the SHA-256 of the JSON (32 bytes), then the JSON, as damaged JSON can still be JSON."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read cached tokenizer {path}: {error.strerror}") from error
    checksum, content = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
    if hashlib.sha256(content).digest() != checksum:
        raise UserError(f"cached tokenizer {path} is damaged")
    return Tokenizer.from_bytes(content, path)


def _tokenizers() -> Any:
    """Import the tokenizers library, which only training and text need."""
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise UserError("the tokenizers library is missing; run pip install 'nagnet[train]'") from error
    module: ModuleType = tokenizers
    return module
