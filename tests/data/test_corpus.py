"""Reading, dropping and splitting of documents."""

import hashlib
import json
import os
import random
import subprocess
import sys

import pytest

from nagnet.data.corpus import Document, read_corpus, split_documents, standard_library_corpus
from nagnet.data.text import PIECE_ANYWHERE
from nagnet.errors import UserError


def some_documents(n: int = 200) -> list[Document]:
    return [Document(f"folder/{i}.txt", f"text number {i}") for i in range(n)]


def all_text(corpus) -> str:
    return "".join(d.text for d in sorted((*corpus.train, *corpus.held_out), key=lambda d: d.name))


def test_split_depends_on_names_only():
    documents = some_documents()
    shuffled = random.Random(0).sample(documents, len(documents))
    first, second = split_documents(documents, "a"), split_documents(shuffled, "b")
    assert first.train == second.train
    assert first.held_out == second.held_out
    assert first.content_hash == second.content_hash
    assert 2 <= len(first.held_out) <= 30


def test_documents_keep_their_side_when_others_are_added():
    few, many = split_documents(some_documents(150), "few"), split_documents(some_documents(300), "many")
    assert set(few.held_out) <= set(many.held_out)
    assert set(few.train) <= set(many.train)


def test_content_hash_sees_names_texts_and_their_border():
    base = [Document("a", "bc"), Document("d", "e")]
    hashes = {
        split_documents(documents, "x").content_hash
        for documents in (
            base,
            [Document("ab", "c"), Document("d", "e")],
            [Document("a", "bC"), Document("d", "e")],
            [Document("a", "bcd"), Document("", "e")],
        )
    }
    assert len(hashes) == 4


@pytest.mark.parametrize("n", range(2, 8))
def test_both_sides_hold_a_document_however_few_there_are(n):
    corpus = split_documents(some_documents(n), "few")
    assert len(corpus.held_out) >= 1
    assert len(corpus.train) >= 1
    assert len(corpus.train) + len(corpus.held_out) == n


def test_one_document_cannot_be_split():
    with pytest.raises(UserError, match="one document"):
        split_documents(some_documents(1), "lonely")


def test_standard_library_has_no_tests_and_a_useful_size():
    corpus = standard_library_corpus()
    assert 8e6 < corpus.train_bytes + corpus.held_out_bytes < 25e6
    assert corpus.held_out_bytes > 1e5
    folders = {part for d in (*corpus.train, *corpus.held_out) for part in d.name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def test_folder_reads_text_of_any_name_and_skips_hidden_files(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("a.txt", "sub/b.md", "sub/noext", ".hidden", ".git/config"):
        (tmp_path / name).write_text(f"content of {name}")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")  # reading it would block for ever
    corpus = read_corpus(tmp_path)
    assert {d.name for d in (*corpus.train, *corpus.held_out)} == {"a.txt", "sub/b.md", "sub/noext"}
    assert corpus.dropped == {"binary": 1, "not_utf8": 1, "empty": 1, "unreadable": 2}


def test_dirty_lines_are_counted_and_logged(tmp_path, caplog):
    lines = [
        json.dumps({"text": "good one"}).encode(),
        json.dumps({"text": ""}).encode(),
        json.dumps({"text": None}).encode(),
        b"null",
        json.dumps({"text": " "}).encode(),
        b'{"text": "\xff\xfe"}',
        b'{"text": "\\ud800"}',
        b"",
        b"{broken",
        b'{"other": 1}',
        b'{"text": 3}',
        json.dumps({"text": "x" * 1_000_000}).encode(),
        json.dumps({"text": "nul \0 inside"}).encode(),
    ]
    path = tmp_path / "shard.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines) + b"\n")
    corpus = read_corpus(path)
    kept = {d.name: d.text for d in (*corpus.train, *corpus.held_out)}
    assert kept.keys() == {"shard.jsonl#0001", "shard.jsonl#0012", "shard.jsonl#0013"}
    assert kept["shard.jsonl#0013"] == "nul \0 inside"
    assert corpus.dropped == {"empty": 3, "null": 2, "not_utf8": 2, "not_json": 1, "no_text": 2}
    assert corpus.long_lines == 1
    assert "3 empty" in caplog.text
    assert "1 documents with a line of 1 MB" in caplog.text


def test_one_text_file_is_cut_at_blank_lines_without_loss(tmp_path):
    paragraphs = [f"Paragraph {i}. " + "word " * 50 for i in range(400)]
    text = "\n\n".join(paragraphs) + "\r\n\n"
    (tmp_path / "book.txt").write_bytes(text.encode())
    corpus = read_corpus(tmp_path / "book.txt")
    assert all_text(corpus) == text
    pieces = (*corpus.train, *corpus.held_out)
    assert len(pieces) > 20
    assert all(d.name.startswith("book.txt#0") for d in pieces)
    assert sum(d.text.startswith("Paragraph") for d in pieces) == len(pieces)


@pytest.mark.parametrize(
    "text",
    ["x" * 200_000, "one line\n" * 10_000, "y" * PIECE_ANYWHERE + "\n" + "z" * 9, "\n" * 9 + "a\r\n" * 9_000],
    ids=["one line", "short lines", "line of the largest size", "other line ends"],
)
def test_files_without_blank_lines_are_cut_too(tmp_path, text):
    (tmp_path / "log.txt").write_bytes(text.encode())
    corpus = read_corpus(tmp_path / "log.txt")
    assert all_text(corpus) == text
    assert max(len(d.text) for d in (*corpus.train, *corpus.held_out)) <= PIECE_ANYWHERE + 16_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "does not exist"),
        ("empty.txt", b"", "no text documents"),
        ("blank.txt", b" \n\n ", "no text documents .*1 empty"),
        ("short.txt", b"too short", "one document"),
        ("binary.txt", b"abc\0def", "not UTF-8 text .binary"),
        ("latin.txt", b"caf\xe9", "not UTF-8 text .not_utf8"),
        ("other.jsonl", b'{"body": "x"}\n', "1 no_text.*field `text`"),
    ],
)
def test_bad_files_give_one_clear_line(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_corpus(tmp_path / name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_of_binaries_is_named_as_such(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.bin").write_bytes(b"\0\1")
    with pytest.raises(UserError, match="all 3 files .* are binary"):
        read_corpus(tmp_path)


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(UserError, match="no text documents"):
        read_corpus(tmp_path)


def test_held_out_names_are_pinned():
    """The split is part of every record: another hash would leak old held-out text into training."""
    names = [d.name for d in split_documents(some_documents(60), "pinned").held_out]
    expected = [
        f"folder/{i}.txt"
        for i in range(60)
        if int(hashlib.sha256(f"folder/{i}.txt".encode()).hexdigest()[:16], 16) < 0.05 * 2**64
    ]
    assert names == sorted(expected)
    assert names


def test_reading_needs_neither_torch_nor_tokenizers():
    code = (
        "import sys, nagnet.data.corpus as c; c.standard_library_corpus; "
        "sys.exit(bool({'torch', 'tokenizers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
