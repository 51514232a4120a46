"""An interrupted preparation goes on, and ends in the same bytes; what does not belong to it is refused."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

import nagnet.data.prepare
from nagnet.data.prepare import Arguments, prepare
from nagnet.data.shards import open_shards, prepared_tokenizer
from nagnet.errors import UserError


@pytest.fixture(scope="module")
def stopped(arguments, interrupt, tmp_path_factory):
    """A folder whose preparation stopped after three shards; only to be copied."""
    return interrupt(arguments, tmp_path_factory.mktemp("stopped") / "out", after=3)


@pytest.fixture
def begun(stopped, tmp_path):
    """A folder of the test's own, whose preparation stopped after three shards."""
    return shutil.copytree(stopped, tmp_path / "begun")


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


KILLED = """
import os, signal, sys
from nagnet.data.prepare import Arguments, prepare
replace, left = os.replace, int(sys.argv[3])
def replace_or_die(*names):
    global left
    left -= 1
    if left == 0 and sys.argv[4] == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*names)
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
os.replace = replace_or_die
prepare(Arguments(source=sys.argv[1], vocab_size=280, shard_tokens=2_000), sys.argv[2])
"""


@pytest.mark.parametrize(
    ("replacement", "moment"),
    [(2, "after"), (5, "before"), (9, "after")],
    ids=["before the first shard", "in the middle of a shard", "after some shards"],
)
def test_a_killed_preparation_goes_on_to_the_same_bytes(source, tmp_path, replacement, moment):
    arguments = Arguments(source=str(source / "lines.jsonl"), vocab_size=280, shard_tokens=2_000)
    prepare(arguments, tmp_path / "whole")
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, arguments.source, str(out), str(replacement), moment]
    assert subprocess.run(command, check=False).returncode == -9
    assert not (out / "manifest.json").exists()
    with pytest.raises(UserError, match="not finished"):
        open_shards(out)
    notices: list[str] = []
    prepare(arguments, out, notice=notices.append)
    assert contents(out) == contents(tmp_path / "whole")
    if replacement == 9:
        assert notices == ["going on after 2 finished shards"]


class Crash(BaseException):
    """Stands for the end of the process: nothing catches it."""


class DyingProcess:
    """Dies at the n-th file that is put in its place, before or after that; the dead clean nothing up."""

    def __init__(self, n: int, before: bool) -> None:
        self.left, self.before, self.dead = n, before, False
        self.real_replace, self.real_unlink = os.replace, os.unlink

    def replace(self, source, target):
        self.left -= 1
        self.dead = self.left == 0
        if not (self.dead and self.before):
            self.real_replace(source, target)
        if self.dead:
            raise Crash

    def unlink(self, *arguments, **options):
        if not self.dead:
            self.real_unlink(*arguments, **options)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_no_moment_of_a_crash_matters(arguments, whole, tmp_path, monkeypatch, before):
    """Each preparation goes on with what the last one left, and dies one step later than that did."""
    tokenizer = prepared_tokenizer(whole)
    monkeypatch.setattr(nagnet.data.prepare, "train_tokenizer", lambda *_: tokenizer)
    out = tmp_path / "out"
    crashes = 0
    while not (out / "manifest.json").exists():
        process = DyingProcess(1 + crashes % 5, before=before)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", process.replace)
            patch.setattr(os, "unlink", process.unlink)
            try:
                prepare(arguments, out)
            except Crash:
                crashes += 1
        assert crashes < 100
    prepare(arguments, out)
    assert crashes > 10
    assert contents(out) == contents(whole)


def test_finished_shards_are_kept(arguments, whole, begun):
    before = {path.name: path.stat().st_mtime_ns for path in begun.glob("shard-*")}
    assert len(before) == 6
    prepare(arguments, begun)
    after = {path.name: path.stat().st_mtime_ns for path in begun.glob("shard-*")}
    assert after.items() > before.items()
    assert contents(begun) == contents(whole)


@pytest.mark.parametrize("damaged", ["shard-00001.bin", "shard-00001.documents.npy", "held_out.jsonl"])
@pytest.mark.parametrize("how", ["flipped", "truncated", "missing"])
def test_a_damaged_shard_is_made_again(arguments, whole, begun, damaged, how):
    content = bytearray((begun / damaged).read_bytes())
    if how == "missing":
        (begun / damaged).unlink()
    else:
        content[len(content) // 2] ^= 1
        (begun / damaged).write_bytes(content if how == "flipped" else content[:-3])
    notices: list[str] = []
    prepare(arguments, begun, notice=notices.append)
    assert damaged in notices[0] and "making it again" in notices[0]
    assert contents(begun) == contents(whole)


def test_a_complete_folder_is_left_alone(arguments, whole):
    before = {path.name: path.stat().st_mtime_ns for path in whole.iterdir()}
    notices: list[str] = []
    manifest = prepare(arguments, whole, notice=notices.append)
    assert manifest == open_shards(whole).manifest
    assert {path.name: path.stat().st_mtime_ns for path in whole.iterdir()} == before
    assert "complete already" in notices[0]


@pytest.mark.parametrize("state", ["complete", "unfinished"])
@pytest.mark.parametrize(
    "change",
    [{"vocab_size": 290}, {"shard_tokens": 7_000}, {"held_out_bytes": 5}, {"max_documents": 9}, {"column": "body"}],
    ids=str,
)
def test_other_arguments_are_refused(arguments, whole, stopped, state, change):
    out = whole if state == "complete" else stopped
    before = contents(out)
    with pytest.raises(UserError, match=f"begun with other arguments .{next(iter(change))} ") as caught:
        prepare(replace(arguments, **change), out)
    assert "\n" not in str(caught.value)
    assert contents(out) == before


@pytest.mark.parametrize("after", [1, 10**9], ids=["unfinished", "complete"])
def test_a_changed_source_is_refused(interrupt, tmp_path, after):
    source = tmp_path / "source"
    source.mkdir()
    for i in range(40):
        (source / f"{i}.txt").write_text(f"document {i}: the cat sat on a mat " * (i % 7 + 1))
    arguments = Arguments(str(source), vocab_size=257, shard_tokens=2_000)
    if after == 1:
        interrupt(arguments, tmp_path / "out", after)
    else:
        prepare(arguments, tmp_path / "out")
    (source / "7.txt").write_text("changed")
    with pytest.raises(UserError, match="source has changed since"):
        prepare(arguments, tmp_path / "out")


def test_a_damaged_note_of_what_is_finished_is_refused(arguments, begun):
    (begun / "unfinished.json").write_text("{")
    with pytest.raises(UserError, match="unfinished.json is damaged"):
        prepare(arguments, begun)


def test_a_second_preparation_of_the_same_folder_is_refused(arguments, begun):
    pytest.importorskip("fcntl")
    with nagnet.data.prepare._locked(begun), pytest.raises(UserError, match="being prepared by another process"):
        prepare(arguments, begun)
    prepare(arguments, begun)
