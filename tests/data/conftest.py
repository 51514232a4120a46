"""A source of every kind of text, what is prepared from it, and shards without any source."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import nagnet.data.writing
from nagnet.data.encoding import token_dtype
from nagnet.data.manifest import Manifest, Totals, digest_of_file
from nagnet.data.prepare import Arguments, prepare
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


@pytest.fixture(scope="session")
def text() -> Callable[[int], str]:
    """The text of a numbered document."""
    words = "hello world, the cat sat on a mat. <|endoftext|> été 漢字 1234\n"
    return lambda i: f"document {i}: " + words * (i % 7 + 1)


@pytest.fixture(scope="session")
def source(text, tmp_path_factory) -> Path:
    """300 documents: text files, JSON lines and two parquet files, the last two with dirt among them."""
    folder = tmp_path_factory.mktemp("source")
    for i in range(20):
        (folder / f"{i:02d}.txt").write_text(text(i))
    lines = [json.dumps({"text": text(i)}).encode() for i in range(20, 100)]
    dirt = [b'{"text": ""}', b'{"text": null}', b'{"text": " "}', b'{"text": "\xff\xfe"}']
    (folder / "lines.jsonl").write_bytes(b"\n".join(lines[:40] + dirt + lines[40:]))
    for k in range(2):
        rows = [text(i) for i in range(100 + 100 * k, 200 + 100 * k)]
        table = pa.table({"text": [*rows[:50], "", None, *rows[50:]]})
        pq.write_table(table, folder / f"{k}.parquet", row_group_size=30)
    return folder


@pytest.fixture(scope="session")
def arguments(source) -> Arguments:
    """Arguments that make several shards of the source."""
    return Arguments(source=str(source), vocab_size=280, shard_tokens=8_000)


@pytest.fixture(scope="session")
def whole(arguments, tmp_path_factory) -> Path:
    """A folder prepared without interruption; not to be changed."""
    out = tmp_path_factory.mktemp("whole") / "out"
    prepare(arguments, out)
    return out


@pytest.fixture(scope="session")
def interrupt() -> Callable[[Arguments, Path, int], Path]:
    """Prepare a folder, but stop after so many shards; return the folder."""

    def interrupt(arguments: Arguments, out: Path, after: int) -> Path:
        finish = nagnet.data.writing.ShardWriter.finish
        done = 0

        def stop(self):
            nonlocal done
            if done == after:
                raise KeyboardInterrupt
            done += 1
            return finish(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nagnet.data.writing.ShardWriter, "finish", stop)
            with pytest.raises(KeyboardInterrupt):
                prepare(arguments, out)
        return out

    return interrupt
