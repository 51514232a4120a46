"""What is taken, what is held out, and when it stops, decided record by record."""

import pytest

from nagnet.data.corpus import Document, name_hash, split_documents
from nagnet.data.manifest import Totals
from nagnet.data.selection import Limits, batches, select, with_threshold
from nagnet.data.sources import Source

ALL = 2**64


class Texts:
    """A part of a source in memory; names begin with a prefix."""

    def __init__(self, prefix: str, texts: list[str | None]) -> None:
        self.items = [(f"{prefix}#{i}", text, "" if text else "null") for i, text in enumerate(texts)]

    def read(self, state):
        yield None, self.items


def source_of(texts: list[str | None], prefix: str = "a", n_bytes: int | None = None) -> Source:
    return Source("a test", "", [Texts(prefix, texts)], n_bytes)


def prefix_with(n: int, wanted: int) -> str:
    """A prefix under which so many of n names fall into the held-out 5 %."""
    for i in range(100_000):
        if sum(name_hash(f"{i}#{k}") < 0.05 * ALL for k in range(n)) == wanted:
            return str(i)
    raise AssertionError("no such prefix")


@pytest.mark.parametrize("wanted", [0, 1, 2, 3], ids=lambda n: f"{n} of 3 below 5 %")
def test_few_documents_are_split_as_split_documents_does(wanted):
    source = source_of(["x", "y", "z"], prefix_with(3, wanted))
    items = list(select(source.read(), with_threshold(source, Limits(None, None, 10**6))))
    documents = [Document(item.record.name, item.record.text or "") for item in items]
    expected = split_documents(documents, "").held_out
    assert [i.record.name for i in items if i.held_out] == [document.name for document in expected]
    assert 1 <= len(expected) <= 2


def test_held_out_text_is_spread_over_a_source_of_known_size():
    texts: list[str | None] = ["x" * 10] * 20_000
    known, unknown = source_of(texts, n_bytes=200_000), source_of(texts)
    wanted = Limits(None, None, held_out_bytes=1_000)
    spread = [i.held_out for i in select(known.read(), with_threshold(known, wanted))]
    assert 60 <= sum(spread) <= 100
    assert sum(spread[10_000:]) > 20
    at_first = [i.held_out for i in select(unknown.read(), with_threshold(unknown, wanted))]
    assert sum(at_first) == 100
    assert not any(at_first[5_000:])


def test_held_out_text_stays_within_its_bytes():
    records = list(source_of(["x" * 60, "y" * 50, "z" * 40, "w"]).read())
    limits = Limits(None, None, held_out_bytes=100, threshold=ALL)
    assert [i.held_out for i in select(records, limits)] == [True, False, True, False]
    # The first is held out however long it is, else there would be none.
    limits = Limits(None, None, held_out_bytes=10, threshold=ALL)
    assert [i.held_out for i in select(records, limits)] == [True, False, False, False]


def test_counts_so_far_are_part_of_every_limit():
    records = list(source_of(["x" * 10, None, "y" * 10, "z" * 10]).read())
    so_far = Totals(documents=2, bytes=20, held_out_documents=1, held_out_bytes=10)

    def taken(**limits):
        values = {"max_documents": None, "max_bytes": None, "held_out_bytes": 0} | limits
        return [(i.record.text or "")[:1] + "!" * i.held_out for i in select(records, Limits(**values), so_far)]

    assert taken() == ["x", "", "y", "z"]
    assert taken(max_documents=3) == []
    assert taken(max_documents=4) == ["x"]
    assert taken(max_bytes=50) == ["x", "", "y"]
    assert taken(held_out_bytes=25, threshold=ALL) == ["x!", "", "y", "z"]


def test_sizes_are_bytes_of_utf_8():
    assert [item.n_bytes for item in select(source_of(["é漢", None]).read(), Limits(None, None, 0))] == [5, 0]


def test_batches_keep_order_and_leave_out_what_is_not_encoded():
    records = source_of([None if i % 7 == 0 else f"text {i}" for i in range(1_000)]).read()
    items = list(select(records, Limits(None, None, 10**6, threshold=ALL // 10)))
    groups = list(batches(items))
    assert [item for group in groups for item in group.items] == items
    assert [text for group in groups for text in group.texts] == [
        item.record.text for item in items if item.record.text and not item.held_out
    ]
    assert len(groups) == 4
    assert len(list(batches(select(source_of(["x" * 150_000] * 4).read(), Limits(None, None, 0))))) == 2
