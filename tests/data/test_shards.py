"""Opening of shards: what fits is read as one array, what does not is named and refused."""

import json

import numpy as np
import pytest

from nagnet.data.corpus import Document
from nagnet.data.shards import held_out_documents, open_shards, prepared_tokenizer
from nagnet.data.tokenizer import train_tokenizer
from nagnet.errors import UserError

SHARDS = [[[1, 2, 3], [4], [5, 6]], [[7, 8]], [[9], [10, 11, 12, 13], []]]
STREAM = [999, 1, 2, 3, 999, 4, 999, 5, 6, 999, 7, 8, 999, 9, 999, 10, 11, 12, 13, 999]


@pytest.fixture
def folder(write_shards):
    return write_shards(SHARDS)


def edit_manifest(folder, change) -> None:
    path = folder / "manifest.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def test_shards_are_one_array_of_documents(folder):
    shards = open_shards(folder, verify=True)
    assert (shards.n_tokens, shards.n_documents, shards.bos_id, shards.vocab_size) == (20, 7, 999, 1000)
    assert shards.offsets.dtype == np.int64
    assert shards.offsets.tolist() == [0, 4, 6, 9, 12, 14, 19, 20]
    spans = [shards.span(a, b) for a, b in zip(shards.offsets[:-1].tolist(), shards.offsets[1:].tolist(), strict=True)]
    assert np.concatenate(spans).tolist() == STREAM
    assert spans[0].dtype == np.uint16
    assert shards.span(15, 17).tolist() == [10, 11]


def test_opening_reads_no_tokens(folder):
    for path in folder.glob("shard-*"):
        size = path.stat().st_size
        header = path.read_bytes()[: 128 if path.suffix == ".npy" else 0]
        path.write_bytes(header + b"\0" * (size - len(header)))  # of the right size, with nothing right in it
    shards = open_shards(folder)
    with pytest.raises(UserError, match="shard-00000.documents.npy is corrupt: its offsets"):
        shards.offsets  # noqa: B018


def test_content_hash_is_that_of_the_tokens(write_shards):
    hashes = {
        name: open_shards(write_shards(shards, vocab_size, name=name)).content_hash
        for name, shards, vocab_size in (
            ("same", SHARDS, 1000),
            ("again", SHARDS, 1000),
            ("token", [[[1, 2, 4], *SHARDS[0][1:]], *SHARDS[1:]], 1000),
            ("last token", [*SHARDS[:2], [[9], [10, 11, 12, 14], []]], 1000),
            ("border", [[[1, 2], [3, 4], [5, 6]], *SHARDS[1:]], 1000),
            ("order", SHARDS[::-1], 1000),
            ("vocabulary", SHARDS, 1001),
        )
    }
    assert hashes["same"] == hashes["again"]
    assert len(set(hashes.values())) == 6


@pytest.mark.parametrize("file", ["shard-00001.bin", "shard-00001.documents.npy"])
@pytest.mark.parametrize("how", ["truncated", "longer", "empty", "missing"])
def test_a_file_of_another_size_is_named_on_opening(folder, file, how):
    path = folder / file
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes({"truncated": content[:-1], "longer": content + b"\0\0", "empty": b""}[how])
    with pytest.raises(UserError, match=file) as caught:
        open_shards(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "file", ["shard-00000.bin", "shard-00002.bin", "shard-00001.documents.npy", "held_out.jsonl", "tokenizer.json"]
)
@pytest.mark.parametrize("how", ["flipped", "missing"])
def test_verifying_names_the_file_that_differs(folder, file, how):
    path = folder / file
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    if how == "missing":
        path.unlink()
    with pytest.raises(UserError, match=file) as caught:
        open_shards(folder, verify=True)
    assert "\n" not in str(caught.value)


def test_verifying_sees_what_the_hashes_do_not(write_shards):
    with pytest.raises(UserError, match="shard-00001.bin is corrupt: its documents do not begin where BOS is"):
        open_shards(write_shards([[[1, 2]], [[3, 999, 4]]], name="bos"), verify=True)
    folder = write_shards([[[1, 2]], [[3, 1500]]], name="large")
    with pytest.raises(UserError, match="shard-00001.bin is corrupt: it holds id 1500 of a vocabulary of 1000"):
        open_shards(folder, verify=True)


def test_an_id_outside_the_vocabulary_is_noticed_when_it_is_read(write_shards):
    shards = open_shards(write_shards([[[1, 2]], [[3, 1500, 4], [5]]]))
    assert shards.span(0, 3).tolist() == [999, 1, 2]
    assert shards.span(3, 5).tolist() == [999, 3]
    with pytest.raises(UserError, match="shard-00001.bin is corrupt: it holds id 1500 of a vocabulary of 1000"):
        shards.span(4, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.pop("format"), "not of the format"),
        (lambda v: v.update(version=2), "its version is 2, this program reads 1"),
        (lambda v: v.pop("dtype"), "lacks or adds dtype"),
        (lambda v: v.update(extra=1), "lacks or adds extra"),
        (lambda v: v.update(vocab_size="1000"), "vocab_size is '1000'"),
        (lambda v: v.update(vocab_size=True), "vocab_size is True"),
        (lambda v: v.update(vocab_size=70_000), "70000 are not uint16"),
        (lambda v: v.update(bos_id=1000), "bos_id 1000 is outside"),
        (lambda v: v.update(shards=[]), "lists no shards"),
        (lambda v: v.update(shards=3), "not iterable"),
        (lambda v: v["shards"].pop(0), "shard 0 is called 'shard-00001.bin'"),
        (lambda v: v["shards"].pop(), "its shards have 12 tokens, its totals say 20"),
        (lambda v: v["shards"][0].update(tokens=-1), "tokens is negative"),
        (lambda v: v["shards"][0].update(tokens_file="../../etc/passwd"), "shard 0 is called"),
        (lambda v: v["shards"].__setitem__(0, None), "Shard is not an object"),
        (lambda v: v["totals"].pop("bytes"), "lacks or adds bytes"),
        (lambda v: v.pop("totals"), "Totals is not an object"),
    ],
)
def test_a_malformed_manifest_is_one_line(folder, change, message):
    edit_manifest(folder, change)
    with pytest.raises(UserError, match=f"manifest.json is malformed .*{message}") as caught:
        open_shards(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe"])
def test_a_manifest_that_is_none_is_one_line(folder, content):
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(UserError, match="manifest.json is malformed") as caught:
        open_shards(folder)
    assert "\n" not in str(caught.value)


def test_missing_and_unfinished_folders_are_told_apart(folder, tmp_path):
    with pytest.raises(UserError, match="nowhere is not a folder; make one with nagnet data prepare"):
        open_shards(tmp_path / "nowhere")
    (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match="manifest.json is missing; prepare the folder"):
        open_shards(folder)
    (folder / "unfinished.json").write_text("{}")
    for read in (open_shards, held_out_documents, prepared_tokenizer):
        with pytest.raises(UserError, match="is not finished; run the same nagnet data prepare command again"):
            read(folder)


def test_held_out_documents_come_back_and_are_checked(folder):
    assert held_out_documents(folder) == [Document("held/out.txt", "é 漢\n\u2028 end")]
    path = folder / "held_out.jsonl"
    path.write_bytes(path.read_bytes().replace(b"end", b"and"))
    with pytest.raises(UserError, match="held_out.jsonl is corrupt"):
        held_out_documents(folder)


def test_the_tokenizer_must_be_that_of_the_shards(folder):
    tokenizer = train_tokenizer(["some text some text"], 260)
    tokenizer.save(folder / "tokenizer.json")
    with pytest.raises(UserError, match="tokenizer.json is corrupt: it is not the tokenizer of the shards"):
        prepared_tokenizer(folder)
    edit_manifest(
        folder, lambda v: v.update(tokenizer_hash=tokenizer.content_hash, vocab_size=260, bos_id=tokenizer.bos_id)
    )
    assert prepared_tokenizer(folder).content_hash == tokenizer.content_hash
