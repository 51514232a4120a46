"""Preparing shards: what is written, what decides it, and what is refused."""

import json
import multiprocessing
from dataclasses import replace

import numpy as np
import pytest

import nagnet.data.prepare
import nagnet.data.writing
from nagnet.data.corpus import read_corpus, standard_library_corpus
from nagnet.data.prepare import Arguments, prepare
from nagnet.data.selection import Limits, select, with_threshold
from nagnet.data.shards import held_out_documents, open_shards, prepared_tokenizer
from nagnet.data.sources import standard_library_source
from nagnet.data.tokenizer import train_tokenizer
from nagnet.errors import UserError


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_document_is_there_once_and_in_order(whole, text):
    shards, tokenizer = open_shards(whole, verify=True), prepared_tokenizer(whole)
    manifest = shards.manifest
    assert len(manifest.shards) >= 5
    assert all(shard.tokens <= 8_000 for shard in manifest.shards)
    texts = []
    for shard in manifest.shards:
        tokens = np.fromfile(whole / shard.tokens_file, dtype="<u2")
        documents = np.load(whole / shard.documents_file, allow_pickle=False)
        assert int((tokens == tokenizer.bos_id).sum()) == shard.documents
        for i, (first, last) in enumerate(zip(documents[0, :-1], documents[0, 1:], strict=True)):
            assert tokens[first] == tokenizer.bos_id
            texts.append(tokenizer.decode(tokens[first:last]))
            assert documents[1, i + 1] - documents[1, i] == len(texts[-1].encode())
    held_out = [document.text for document in held_out_documents(whole)]
    assert 5 <= len(held_out) <= 30
    everything = [text(i) for i in range(300)]
    assert texts == [t for t in everything if t not in held_out]
    assert held_out == [t for t in everything if t in held_out]
    totals = manifest.totals
    assert (totals.documents, totals.held_out_documents) == (len(texts), len(held_out))
    assert totals.tokens == shards.n_tokens == sum(shard.tokens for shard in manifest.shards)
    assert totals.bytes + totals.held_out_bytes == sum(len(t.encode()) for t in everything)
    assert totals.dropped == {"empty": 4, "not_utf8": 1, "null": 3}


def test_what_is_held_out_is_what_read_corpus_holds_out(whole, source):
    assert sorted(held_out_documents(whole), key=lambda d: d.name) == list(read_corpus(source).held_out)


def test_the_standard_library_is_split_as_everywhere():
    corpus, source = standard_library_corpus(), standard_library_source()
    items = list(select(source.read(), with_threshold(source, Limits(None, None, 10_000_000))))
    for documents, held_out in ((corpus.train, False), (corpus.held_out, True)):
        chosen = [i for i in items if i.record.text is not None and i.held_out == held_out]
        assert [i.record.name for i in chosen] == [document.name for document in documents]
        assert sum(i.n_bytes for i in chosen) == sum(document.n_bytes for document in documents)


def test_the_tokenizer_sees_no_held_out_text_and_no_more_than_its_bytes(tmp_path, monkeypatch):
    folder = tmp_path / "source"
    folder.mkdir()
    for i in range(100):
        (folder / f"{i:02d}.txt").write_text("a plain text")
    for document in read_corpus(folder).held_out:
        (folder / document.name).write_text("zqzqzqzq")
    (folder / "99.txt").write_text("xjxjxjxj")
    held_out = {document.text for document in read_corpus(folder).held_out}
    assert held_out == {"zqzqzqzq"}

    seen = []

    def train(texts, vocab_size):
        seen.append(list(texts))
        return train_tokenizer(seen[-1], vocab_size)

    monkeypatch.setattr(nagnet.data.prepare, "train_tokenizer", train)
    for n_bytes in (10_000, 100):
        prepare(Arguments(str(folder), vocab_size=258, tokenizer_bytes=n_bytes), tmp_path / str(n_bytes))
    assert set(seen[0]) == {"a plain text", "xjxjxjxj"}
    assert seen[1] == ["a plain text"] * 9


def test_a_long_line_is_kept_and_counted(tmp_path, caplog):
    lines = [{"text": "x" * 1_000_000}, {"text": "é" * 500_000}, {"text": "x" * 999_999}, {"text": "short"}]
    (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, lines)))
    arguments = Arguments(str(tmp_path / "long.jsonl"), vocab_size=257, held_out_bytes=0)
    totals = prepare(arguments, tmp_path / "out").totals
    assert (totals.documents, totals.long_lines) == (4, 2)
    assert "2 documents with a line of 1 MB or more" in caplog.text
    open_shards(tmp_path / "out", verify=True)


def test_control_text_makes_no_special_id(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "hi<|endoftext|>x <| bos |>"}) + "\n")
    prepare(Arguments(str(tmp_path / "a.jsonl"), vocab_size=257, held_out_bytes=0), tmp_path / "out")
    shards, tokenizer = open_shards(tmp_path / "out"), prepared_tokenizer(tmp_path / "out")
    tokens = shards.span(0, shards.n_tokens)
    assert tokens.tolist().count(tokenizer.bos_id) == 1
    assert tokenizer.decode(tokens) == "hi<|endoftext|>x <| bos |>"


def test_processes_change_nothing(arguments, whole, tmp_path, monkeypatch):
    monkeypatch.setattr("nagnet.data.selection._BATCH_RECORDS", 7)
    prepare(arguments, tmp_path / "out", workers=2)
    assert contents(tmp_path / "out") == contents(whole)


def test_a_process_that_dies_is_one_line_and_the_rest_is_kept(arguments, whole, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr("nagnet.data.selection._BATCH_RECORDS", 5)

    def kill_one(totals, n_bytes):
        if totals.documents > 100:
            for process in multiprocessing.active_children()[:1]:
                process.kill()
                process.join()

    with pytest.raises(UserError, match="fewer --workers"):
        prepare(arguments, out, workers=2, progress=kill_one)
    kept = list(out.glob("shard-*.bin"))
    assert kept and not (out / "manifest.json").exists()
    prepare(arguments, out)
    assert contents(out) == contents(whole)


def test_a_vocabulary_above_65536_takes_four_bytes(tmp_path, text):
    description = json.loads(train_tokenizer(["x"], 257).to_bytes())
    vocabulary = description["model"]["vocab"]
    bos = vocabulary.popitem()[0]
    for name in (*(f"unused {i}" for i in range(70_000)), bos):
        vocabulary[name] = len(vocabulary)
    (tmp_path / "large.json").write_text(json.dumps(description))
    (tmp_path / "a.txt").write_text(text(5) * 100)
    out = tmp_path / "out"
    manifest = prepare(Arguments(str(tmp_path / "a.txt"), tokenizer=tmp_path / "large.json"), out)
    assert (manifest.dtype, open_shards(out, verify=True).span(0, 3).dtype) == ("uint32", np.uint32)
    assert open_shards(out).span(0, 1)[0] == manifest.bos_id == 70_256
    first = manifest.shards[0]
    assert (out / first.tokens_file).stat().st_size == 4 * first.tokens


def test_a_given_tokenizer_is_used_and_copied(arguments, source, tmp_path, text):
    tokenizer = train_tokenizer([text(3)], 262)
    tokenizer.save(tmp_path / "mine.json")
    given = replace(arguments, vocab_size=None, tokenizer=tmp_path / "mine.json")
    assert prepare(given, tmp_path / "out").tokenizer_hash == tokenizer.content_hash
    assert prepared_tokenizer(tmp_path / "out").content_hash == tokenizer.content_hash
    train_tokenizer([text(3)], 261).save(tmp_path / "mine.json")
    with pytest.raises(UserError, match="begun with other arguments .tokenizer"):
        prepare(given, tmp_path / "out")


@pytest.mark.parametrize(
    ("limits", "documents"),
    [({"max_documents": 7}, 7), ({"max_bytes": 2_000}, None), ({"max_documents": 10, "max_bytes": 10**9}, 10)],
    ids=str,
)
def test_limits_take_the_first_documents(arguments, source, tmp_path, limits, documents):
    totals = prepare(replace(arguments, vocab_size=257, **limits), tmp_path / "out").totals
    everything = [document.text for document in read_corpus(source).train + read_corpus(source).held_out]
    if documents is not None:
        assert totals.kept_documents == documents
    else:
        assert 1_500 < totals.kept_bytes <= 2_000
    assert totals.held_out_documents >= 1
    assert totals.kept_bytes <= sum(len(t.encode()) for t in everything)


def test_held_out_text_can_be_little_or_none(arguments, tmp_path):
    manifest = prepare(replace(arguments, held_out_bytes=1_500, vocab_size=257), tmp_path / "out")
    assert 0 < manifest.totals.held_out_bytes <= 1_500
    names = [document.name for document in held_out_documents(tmp_path / "out")]
    none = prepare(replace(arguments, held_out_bytes=0, vocab_size=257), tmp_path / "none")
    assert (none.totals.held_out_documents, held_out_documents(tmp_path / "none")) == (0, [])
    assert none.totals.documents == manifest.totals.documents + len(names)


def test_foreign_files_are_never_touched(arguments, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="holds files that nagnet data prepare did not write"):
        prepare(arguments, tmp_path)
    with pytest.raises(UserError, match="holds files that"):
        prepare(arguments, tmp_path / "thesis.txt")
    assert contents(tmp_path) == {"thesis.txt": b"mine"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shard_tokens": 0}, "--shard-tokens 0"),
        ({"max_bytes": 0}, "--max-bytes 0"),
        ({"max_documents": -1}, "--max-documents -1"),
        ({"tokenizer_bytes": 0}, "--tokenizer-bytes 0"),
        ({"held_out_bytes": -1}, "--held-out-bytes -1"),
        ({"vocab_size": 5_000}, "supports a vocabulary of"),
        ({"vocab_size": 100}, "at least 257"),
        ({"tokenizer": "x.json"}, "--tokenizer and --vocab-size exclude each other"),
        ({"tokenizer": "x.json", "vocab_size": None}, "cannot read tokenizer x.json"),
        ({"max_documents": 1}, "holds one document only"),
        ({"max_bytes": 3}, "holds no text documents within the limits"),
        ({"source": "missing"}, "missing does not exist"),
    ],
    ids=str,
)
def test_bad_input_writes_nothing(arguments, tmp_path, change, message):
    with pytest.raises(UserError, match=message) as caught:
        prepare(replace(arguments, **change), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="--workers 0"):
        prepare(arguments, tmp_path / "out", workers=0)


def test_progress_counts_up_to_the_end(arguments, tmp_path):
    seen: list[tuple[int, int, int | None]] = []
    prepare(arguments, tmp_path / "out", progress=lambda t, total: seen.append((t.kept_bytes, t.tokens, total)))
    assert seen[0][:2] == (0, 0)
    assert seen == sorted(seen)
    totals = open_shards(tmp_path / "out").manifest.totals
    assert seen[-1][:2] == (totals.kept_bytes, totals.tokens)
    assert seen[-1][2] == pytest.approx(totals.kept_bytes, rel=0.5)
