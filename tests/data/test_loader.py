"""Packing of documents and batches as a function of seed, step and rank."""

import time

import numpy as np
import pytest
import torch

from nagnet.data.corpus import Document
from nagnet.data.loader import BatchLoader, PackedTokens, encode_documents
from nagnet.data.shards import open_shards
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


def as_shards(packed: PackedTokens, write_shards, n_shards: int = 3):
    """The same documents in shards."""
    documents = [packed.tokens[a + 1 : b] for a, b in zip(packed.offsets[:-1], packed.offsets[1:], strict=True)]
    size = -(-len(documents) // n_shards)
    return open_shards(write_shards([documents[i : i + size] for i in range(0, len(documents), size)]))


def test_shards_give_the_batches_of_the_array(packed, write_shards):
    shards = as_shards(packed, write_shards)
    assert (shards.n_tokens, shards.n_documents) == (packed.n_tokens, packed.n_documents)
    in_memory, on_disk = BatchLoader(packed, 4, 6, seed=2), BatchLoader(shards, 4, 6, seed=2)
    for step in range(30):
        assert equal(in_memory.batch(step), on_disk.batch(step))


def test_order_of_documents_and_rows_is_that_of_numpy(packed):
    """Written out once more: another order would change every recorded loss."""
    random = np.random.default_rng([3, 2])
    order = BatchLoader(packed, 1, 4, seed=3)._epoch(2)
    assert np.array_equal(order.documents, random.permutation(packed.n_documents))
    assert np.array_equal(order.rows, random.permutation((packed.n_tokens - 1) // 4))


@pytest.mark.parametrize("world_size", [1, 2])
def test_resuming_twice_gives_the_same_stream(write_shards, world_size):
    """3 shards of 7 documents, two epochs, interrupted before each step; every resumption opens the files anew."""
    random = np.random.default_rng(0)
    documents = [random.integers(0, 998, random.integers(5, 25)).tolist() for _ in range(21)]
    folder = write_shards([documents[:7], documents[7:14], documents[14:]])

    def stream(start: int, stop: int) -> list[bytes]:
        """Bytes that each step of a new set of processes reads."""
        loaders = [BatchLoader(open_shards(folder), 4 // world_size, 4, 11, r, world_size) for r in range(world_size)]
        steps = [[loader.batch(step) for loader in loaders] for step in range(start, stop)]
        return [b"".join(torch.cat(part).numpy().tobytes() for part in zip(*ranks, strict=True)) for ranks in steps]

    one = BatchLoader(open_shards(folder), 4, 4, 11)
    whole = [b"".join(part.numpy().tobytes() for part in one.batch(step)) for step in range(50)]
    assert one.epoch_of(0) == 0 and one.epoch_of(39) >= 1 and one.epoch_of(49) >= 1
    for stop in range(1, 41):
        again = (stop + 50) // 2
        assert stream(0, stop) + stream(stop, again) + stream(again, 50) == whole


def test_an_id_outside_the_vocabulary_names_the_shard(write_shards):
    loader = BatchLoader(open_shards(write_shards([[[1, 2, 3]] * 4, [[1, 2, 3], [4, 1200, 5]]])), 1, 4, 0)
    with pytest.raises(UserError, match="shard-00001.bin is corrupt: it holds id 1200 of a vocabulary of 1000"):
        for step in range(loader.rows_per_epoch):
            loader.batch(step)


def test_content_hash_sees_tokens_borders_and_vocabulary(packed):
    changed = packed.tokens.copy()
    changed[5] += 1
    other_borders = PackedTokens(np.array([BOS, 1, BOS, 2], np.uint16), np.array([0, 2, 4]), BOS, 1000)
    same_tokens = PackedTokens(np.array([BOS, 1, BOS, 2], np.uint16), np.array([0, 4]), BOS, 1000)
    hashes = {
        packed.content_hash,
        PackedTokens(changed, packed.offsets, BOS, 1000).content_hash,
        PackedTokens(packed.tokens, packed.offsets, BOS, 1001).content_hash,
        other_borders.content_hash,
        same_tokens.content_hash,
    }
    assert len(hashes) == 5
    assert PackedTokens(packed.tokens.copy(), packed.offsets, BOS, 1000).content_hash in hashes


def test_one_epoch_at_a_time_is_kept(packed):
    loader = BatchLoader(packed, 5, 6, seed=0)
    for step in range(30):
        loader.batch(step)
        assert len(loader._epochs) <= 2
    assert set(loader._epochs) == {loader.epoch_of(29)}


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


@pytest.mark.parametrize("source", ["memory", "shards"])
def test_batches_are_quick(source, write_shards):
    offsets = np.arange(0, 2_000_001, 500)
    tokens = np.ones(2_000_000, dtype=np.uint16)
    tokens[offsets[:-1]] = BOS
    packed = PackedTokens(tokens, offsets, BOS, vocab_size=1000)
    loader = BatchLoader(packed if source == "memory" else as_shards(packed, write_shards), 32, 512, 0)
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
