"""Sources: the same records from any point on, whatever they are read from, and what is wrong is named."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nagnet.data.sources import Cursor, open_source
from nagnet.errors import UserError

DIRTY = [b"good", b"", None, b" ", b"\xff\xfe", b"x" * 1_000_000, b"nul \0 inside"]


def string_array(values: list[bytes | None]) -> pa.Array:
    """A string column of any bytes, as a faulty writer leaves it."""
    raw = pa.array(values, pa.binary())
    validity, offsets, data = raw.buffers()
    return pa.StringArray.from_buffers(len(raw), offsets, data, validity, raw.null_count)


def write_parquet(path, texts, column="text", rows_in_group=100):
    values = texts if isinstance(texts, pa.Array) else pa.array(texts)
    pq.write_table(pa.table({"id": pa.array(range(len(values))), column: values}), path, row_group_size=rows_in_group)


@pytest.fixture
def folder(tmp_path):
    """Text, JSON lines and parquet, 913 documents."""
    folder = tmp_path / "mixed"
    (folder / "sub").mkdir(parents=True)
    for i in range(5):
        (folder / "sub" / f"{i}.txt").write_text(f"text file {i}")
    lines = [json.dumps({"text": f"line {i} é"}) for i in range(8)]
    (folder / "lines.jsonl").write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode())
    for i in range(3):
        write_parquet(folder / f"{i}.parquet", [f"table {i} row {row}" for row in range(300)])
    return folder


def names_and_texts(records) -> list[tuple]:
    return [(record.name, record.text, record.reason) for record in records]


def test_a_folder_gives_text_then_lines_then_rows_in_order(folder):
    records = list(open_source(str(folder)).read())
    assert [record.text for record in records] == [
        *(f"line {i} é" for i in range(8)),
        *(f"text file {i}" for i in range(5)),
        *(f"table {i} row {row}" for i in range(3) for row in range(300)),
    ]
    assert len({record.name for record in records}) == len(records) == 913
    assert records[8].name == "sub/0.txt"
    assert records[13].name == "parquet#00000001"


@pytest.mark.parametrize("kind", ["folder", "pieces", "stdlib"])
def test_reading_goes_on_from_any_record(folder, kind):
    book = folder / "sub" / "book.txt"
    book.write_text("\ufeff" + "".join(f"Paragraph {i}. {'word ' * 300}\n\n" for i in range(200)))
    source = open_source({"folder": str(folder), "pieces": str(book), "stdlib": "stdlib"}[kind])
    records = list(source.read())
    assert len(records) > 40
    # The borders of files, of row groups (100 rows) and of reads (256 rows) are among these.
    chosen = {0, 1, 7, 8, 12, 13, 14, *range(100, 120), 268, 269, 270, 312, 313, 314, 524, 525, 526, len(records) - 1}
    for i in sorted(i for i in chosen if i < len(records)):
        cursor = Cursor(*json.loads(json.dumps(records[i].cursor)))
        assert names_and_texts(source.read(cursor)) == names_and_texts(records[i:])
    assert list(source.read(Cursor(len(source.parts)))) == []


@pytest.mark.parametrize("kind", ["string", "binary", "large_string"])
def test_a_dirty_table_is_read_to_its_end(tmp_path, kind):
    values = {
        "string": string_array(DIRTY),
        "binary": pa.array(DIRTY, pa.binary()),
        "large_string": string_array(DIRTY).cast(pa.large_binary()).view(pa.large_string()),
    }[kind]
    write_parquet(tmp_path / "dirty.parquet", values)
    records = list(open_source(str(tmp_path / "dirty.parquet")).read())
    assert [record.reason for record in records] == ["", "empty", "null", "empty", "not_utf8", "", ""]
    assert [record.text for record in records if not record.reason] == ["good", "x" * 1_000_000, "nul \0 inside"]


def test_tables_of_different_kinds_go_together(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["one"])
    write_parquet(tmp_path / "b.parquet", pa.array([b"two", b"\xff"], pa.binary()))
    write_parquet(tmp_path / "c.parquet", pa.array(["three"], pa.large_string()))
    texts = [record.text for record in open_source(str(tmp_path)).read()]
    assert texts == ["one", "two", None, "three"]


def test_another_column(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["row"], column="body")
    (tmp_path / "b.jsonl").write_text('{"body": "line"}\n{"text": "x"}\n')
    records = open_source(str(tmp_path), column="body").read()
    assert [(record.text, record.reason) for record in records] == [("line", ""), (None, "no_text"), ("row", "")]


def test_size_is_about_that_of_the_text(tmp_path):
    texts = [os.urandom(500).hex() for _ in range(1000)]
    write_parquet(tmp_path / "a.parquet", texts)
    (tmp_path / "b.txt").write_text("x" * 1000)
    assert open_source(str(tmp_path)).n_bytes == pytest.approx(1_001_000, rel=0.05)


def test_fingerprint_sees_a_changed_file(folder):
    before = open_source(str(folder)).fingerprint
    assert open_source(str(folder)).fingerprint == before
    file = folder / "sub" / "0.txt"
    times = file.stat()
    file.write_text("longer than it was")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    by_size = open_source(str(folder)).fingerprint
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    by_time = open_source(str(folder)).fingerprint
    (folder / "sub" / "new.txt").write_text("new")
    assert len({before, by_size, by_time, open_source(str(folder)).fingerprint}) == 4


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_bytes(b"PAR1 but not really"), "cannot read parquet file .*bad.parquet"),
        (lambda path: path.write_bytes(b""), "cannot read parquet file .*bad.parquet"),
        (lambda path: write_parquet(path, ["x"], column="body"), "bad.parquet has no column text; choose .*id, body"),
        (lambda path: write_parquet(path, [1.5]), "column text of .*bad.parquet holds double, not text"),
    ],
    ids=["damaged", "empty", "other column", "numbers"],
)
def test_a_bad_table_is_named_before_anything_is_read(tmp_path, write, message):
    write_parquet(tmp_path / "a.parquet", ["fine"])
    write(tmp_path / "bad.parquet")
    with pytest.raises(UserError, match=message) as caught:
        open_source(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_table_damaged_inside_is_one_line(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, [os.urandom(50).hex() for _ in range(1000)])
    content = bytearray(path.read_bytes())
    content[2000:20_000] = b"\x07" * 18_000
    path.write_bytes(content)
    with pytest.raises(UserError, match="reading parquet failed .*run the same command again") as caught:
        list(open_source(str(path)).read())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("nowhere", {}, "nowhere does not exist"),
        ("climbmix", {}, "for the data set on the hub write hf:climbmix"),
        ("hf:", {}, "hf: is no data set on the hub"),
        ("hf:a/b/c/d", {}, "hf:OWNER/NAME/SUBSET or hf: and one of climbmix, fineweb-edu"),
        ("hf:a/b/c", {"subset": "d"}, "hf:a/b/c is no data set"),
        ("stdlib", {"subset": "d"}, "--subset is for data sets on the hub"),
    ],
)
def test_what_is_no_source_is_refused(tmp_path, monkeypatch, spec, options, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        open_source(spec, **options)


def test_a_single_text_file_is_checked_to_its_end(tmp_path):
    path = tmp_path / "late.txt"
    for tail, reason in ((b"\xff", "not_utf8"), (b"\0", "binary"), ("é".encode()[:1], "not_utf8")):
        path.write_bytes(b"good text\n" * 200_000 + tail)
        with pytest.raises(UserError, match=f"late.txt is not UTF-8 text .{reason}"):
            open_source(str(path))
