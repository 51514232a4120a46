"""Packing of documents and batches as a function of seed, step and rank."""

import time

import numpy as np
import pytest
import torch

from nagnet.data.corpus import Document
from nagnet.data.loader import BatchLoader, PackedTokens, encode_documents
from nagnet.data.tokenizer import train_tokenizer
from nagnet.errors import UserError

BOS = 999


def packed_documents(lengths, dtype=np.uint16) -> PackedTokens:
    """Documents of BOS and consecutive numbers, so that each token tells where it comes from."""
    offsets = np.concatenate([[0], np.cumsum(np.array(lengths) + 1)]).astype(np.int64)
    tokens = np.arange(offsets[-1]).astype(dtype)
    tokens[offsets[:-1]] = BOS
    return PackedTokens(tokens, offsets, bos_id=BOS, vocab_size=1000)


@pytest.fixture
def packed() -> PackedTokens:
    return packed_documents([7, 1, 30, 12, 5, 19, 3, 3, 25, 40, 2, 11])


def equal(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def stream_of(packed: PackedTokens, seed: int, epoch: int, seq_len: int) -> tuple[list[int], BatchLoader]:
    """Put the rows of an epoch back in the order of the stream, by their overlapping ends."""
    loader = BatchLoader(packed, 1, seq_len, seed)
    n = loader.rows_per_epoch
    rows = [loader.batch(epoch * n + i)[0][0].tolist() for i in range(n)]
    order = loader._epoch(epoch).rows
    return [token for i in np.argsort(order) for token in rows[i]], loader


def test_targets_are_inputs_shifted_by_one_and_never_bos(packed):
    loader = BatchLoader(packed, 4, 6, seed=1)
    for step in range(10):
        inputs, targets = loader.batch(step)
        assert inputs.shape == targets.shape == (4, 6)
        assert inputs.dtype == targets.dtype == torch.int64
        following = inputs[:, 1:]
        assert torch.equal(targets[:, :-1], torch.where(following == BOS, -100, following))
        assert BOS not in targets
        inside = targets != -100
        # Within a document each token is its predecessor plus one; BOS hides its own number.
        ordinary = inside & (inputs != BOS)
        assert torch.equal(targets[ordinary], inputs[ordinary] + 1)


def test_ignoring_targets_leaves_the_inputs_of_a_single_row_alone(packed):
    loader = BatchLoader(packed, 1, 8, seed=0)
    ignored = 0
    for step in range(loader.rows_per_epoch):
        inputs, targets = loader.batch(step)
        assert (inputs >= 0).all()
        ignored += int((targets < 0).sum())
    assert ignored > 0


def test_an_epoch_holds_every_document_whole_in_a_new_order(packed):
    originals = {
        tuple(packed.tokens[a:b].tolist()) for a, b in zip(packed.offsets[:-1], packed.offsets[1:], strict=True)
    }
    orders = []
    for epoch in range(3):
        stream, _ = stream_of(packed, seed=5, epoch=epoch, seq_len=1)
        starts = [i for i, token in enumerate(stream) if token == BOS]
        documents = [tuple(stream[a:b]) for a, b in zip(starts, [*starts[1:], None], strict=True)]
        assert len(documents) == packed.n_documents
        assert set(documents[:-1]) <= originals  # the last token of the stream is a target only
        orders.append(documents)
    assert orders[0] != orders[1] != orders[2]


def test_every_token_is_a_target_once_an_epoch(packed):
    loader = BatchLoader(packed, 1, 4, seed=0)
    targets = torch.cat([loader.batch(i)[1].flatten() for i in range(loader.rows_per_epoch)])
    counted = targets[targets != -100].tolist()
    assert len(counted) == len(set(counted))
    text = set(packed.tokens.tolist()) - {BOS}
    assert text >= set(counted)
    assert len(text) - len(counted) <= 4


def test_batches_are_a_function_of_seed_and_step(packed):
    loader = BatchLoader(packed, 3, 5, seed=7)
    steps = list(range(40))
    batches = [loader.batch(step) for step in steps]
    assert loader.epoch_of(39) >= 2
    for step in [39, 0, 17, 3, 38, 16]:
        assert equal(BatchLoader(packed, 3, 5, seed=7).batch(step), batches[step])
        assert equal(loader.batch(step), batches[step])
    assert not equal(BatchLoader(packed, 3, 5, seed=8).batch(0), batches[0])


def test_rows_do_not_depend_on_the_batch_size(packed):
    small, large = BatchLoader(packed, 2, 5, seed=7), BatchLoader(packed, 6, 5, seed=7)
    for step in range(12):
        parts = [small.batch(3 * step + i)[0] for i in range(3)]
        assert torch.equal(torch.cat(parts), large.batch(step)[0])


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_together_read_what_one_process_reads(packed, world_size):
    one = BatchLoader(packed, 2 * world_size, 5, seed=3)
    many = [BatchLoader(packed, 2, 5, seed=3, rank=r, world_size=world_size) for r in range(world_size)]
    for step in range(30):
        parts = [loader.batch(step) for loader in many]
        assert equal([torch.cat(column) for column in zip(*parts, strict=True)], one.batch(step))
        assert {loader.epoch_of(step) for loader in many} == {one.epoch_of(step)}


def test_epoch_of_counts_the_rows(packed):
    loader = BatchLoader(packed, 5, 6, seed=0)
    assert loader.rows_per_epoch == (len(packed.tokens) - 1) // 6 == 28
    assert [loader.epoch_of(step) for step in (0, 5, 6, 11, 12, 16, 17)] == [0, 0, 1, 1, 2, 2, 3]


def test_a_memory_map_gives_the_same_batches(packed, tmp_path):
    np.save(tmp_path / "tokens.npy", packed.tokens)
    mapped = PackedTokens(np.load(tmp_path / "tokens.npy", mmap_mode="r"), packed.offsets, BOS, 1000)
    assert equal(BatchLoader(mapped, 4, 6, 0).batch(9), BatchLoader(packed, 4, 6, 0).batch(9))


def test_too_few_tokens_names_both_numbers():
    packed = packed_documents([9, 9])
    BatchLoader(packed, 1, 19, 0).batch(0)
    with pytest.raises(UserError, match="20 tokens but one batch needs 21"):
        BatchLoader(packed, 1, 20, 0)
    with pytest.raises(UserError, match="20 tokens but one batch needs 41"):
        BatchLoader(packed, 4, 5, 0, rank=1, world_size=2)


@pytest.mark.parametrize(
    "change",
    [{"batch_size": 0}, {"seq_len": 0}, {"seed": -1}, {"rank": 1}, {"rank": -1}, {"world_size": 0}],
    ids=str,
)
def test_bad_numbers_are_refused(packed, change):
    with pytest.raises(UserError):
        BatchLoader(**{"packed": packed, "batch_size": 2, "seq_len": 4, "seed": 0, **change})
    with pytest.raises(UserError, match="step -1"):
        BatchLoader(packed, 2, 4, 0).batch(-1)


@pytest.mark.parametrize(
    ("tokens", "offsets", "message"),
    [
        ([BOS, 1, 1000], [0, 3], "1000 exceed the vocabulary of 1000"),
        ([BOS, 1, -1], [0, 3], "-1 to 999 exceed"),
        ([BOS, 1, 2], [0, 2], "offsets"),
        ([BOS, 1, 2], [0, 3, 3], "offsets"),
        ([BOS, 1, 2], [0, 2, 3], "begin with BOS"),
        ([], [0], "offsets"),
    ],
)
def test_inconsistent_arrays_are_refused(tokens, offsets, message):
    with pytest.raises(UserError, match=message):
        PackedTokens(np.array(tokens, dtype=np.int64), np.array(offsets), BOS, 1000)


def test_batches_are_quick():
    offsets = np.arange(0, 2_000_001, 500)
    tokens = np.ones(2_000_000, dtype=np.uint16)
    tokens[offsets[:-1]] = BOS
    packed = PackedTokens(tokens, offsets, BOS, vocab_size=1000)
    loader = BatchLoader(packed, 32, 512, 0)
    loader.batch(0)
    start = time.process_time()
    for step in range(1, 11):
        loader.batch(step)
    assert 10 * 32 * 512 / (time.process_time() - start) > 1e6


TEXTS = ["hello hello hello", "<|endoftext|> world world", "é 漢", "hello world"]
DOCUMENTS = [Document(f"{i}.txt", text) for i, text in enumerate(TEXTS * 100)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS * 2, 262)


def test_each_document_begins_with_the_only_bos(tokenizer):
    packed = encode_documents(DOCUMENTS, tokenizer)
    assert packed.tokens.dtype == np.uint16
    assert packed.offsets.dtype == np.int64
    assert int((packed.tokens == tokenizer.bos_id).sum()) == packed.n_documents == len(DOCUMENTS)
    for i in (0, 1, 2, 255, 256, 399):
        tokens = packed.tokens[packed.offsets[i] : packed.offsets[i + 1]]
        assert tokens[0] == tokenizer.bos_id
        assert tokenizer.decode(tokens) == DOCUMENTS[i].text


def test_encoding_nothing_is_an_error(tokenizer):
    with pytest.raises(UserError, match="no documents"):
        encode_documents([], tokenizer)


def test_cached_tokens_are_used_repaired_and_keyed(tokenizer, tmp_path, monkeypatch, caplog):
    first = encode_documents(DOCUMENTS, tokenizer, tmp_path)
    (file,) = tmp_path.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr("nagnet.data.loader._encode", lambda *_: pytest.fail("encoded again"))
        assert np.array_equal(encode_documents(DOCUMENTS, tokenizer, tmp_path).tokens, first.tokens)
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 3] ^= 1
    for damage in (b"", b"junk", whole[:-50], bytes(flipped)):
        file.write_bytes(damage)
        assert np.array_equal(encode_documents(DOCUMENTS, tokenizer, tmp_path).tokens, first.tokens)
        assert file.read_bytes() == whole
    assert caplog.text.count("encoding again") == 4
    encode_documents(DOCUMENTS[::-1], tokenizer, tmp_path)
    encode_documents(DOCUMENTS, train_tokenizer(TEXTS * 2, 261), tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
