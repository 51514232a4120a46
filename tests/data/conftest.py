"""Small folders of shards, written without reading any source."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from nagnet.data.encoding import token_dtype
from nagnet.data.manifest import Manifest, Totals, digest_of_file
from nagnet.data.writing import HeldOutWriter, ShardWriter

WriteShards = Callable[..., Path]


@pytest.fixture
def write_shards(tmp_path) -> WriteShards:
    """Write shards of given documents, each a list of ids without BOS, as a preparation would."""

    def write(shards: Sequence[Sequence[Sequence[int]]], vocab_size: int = 1000, name: str = "shards") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        dtype, bos_id = token_dtype(vocab_size), vocab_size - 1
        entries = []
        for number, documents in enumerate(shards):
            writer = ShardWriter(folder, number)
            for document in documents:
                writer.add(np.array([bos_id, *document], dtype=dtype), n_bytes=2 * len(document))
            entries.append(writer.finish())
        held_out = HeldOutWriter(folder, 0)
        held_out.add("held/out.txt", "é 漢\n\u2028 end")
        held_out_sha256 = held_out.flush()
        held_out.close()
        (folder / "tokenizer.json").write_text("{}")
        totals = Totals(
            documents=sum(entry.documents for entry in entries),
            tokens=sum(entry.tokens for entry in entries),
            bytes=sum(entry.bytes for entry in entries),
        )
        manifest = Manifest(
            version=1,
            dtype=dtype.name,
            vocab_size=vocab_size,
            bos_id=bos_id,
            tokenizer_hash="none",
            tokenizer_sha256=digest_of_file(folder / "tokenizer.json").hexdigest(),
            held_out_sha256=held_out_sha256,
            source="a test",
            fingerprint="",
            arguments={},
            totals=totals,
            shards=tuple(entries),
        )
        (folder / "manifest.json").write_text(manifest.to_json())
        return folder

    return write
