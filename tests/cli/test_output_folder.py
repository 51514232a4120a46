"""An output folder belongs to one run, and nothing that nagnet did not write is ever deleted."""

import errno
import os
from pathlib import Path

import pytest

from nagnet.cli.output_folder import MARKER, claim_output_folder
from nagnet.errors import UserError


def snapshot(folder: Path) -> dict[str, bytes | None]:
    paths = folder.rglob("*")
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


def earlier_run(folder: Path) -> None:
    claim_output_folder(folder, force=False)
    (folder / "summary.json").write_text("{}")
    (folder / "arm").mkdir()
    (folder / "arm" / "model.bin").write_bytes(b"weights")


@pytest.mark.parametrize("force", [False, True])
def test_takes_a_new_or_empty_folder(tmp_path, force):
    new = tmp_path / "a" / "b"
    assert claim_output_folder(new, force) == new
    assert set(snapshot(new)) == {MARKER}
    claim_output_folder(new, force)  # holds the marker alone, so it is still free
    empty = tmp_path / "empty"
    empty.mkdir()
    claim_output_folder(empty, force)
    assert set(snapshot(empty)) == {MARKER}


def test_refuses_another_run_without_force(tmp_path):
    earlier_run(tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(UserError, match="--force"):
        claim_output_folder(tmp_path, force=False)
    assert snapshot(tmp_path) == before


def test_force_deletes_another_run(tmp_path):
    earlier_run(tmp_path)
    claim_output_folder(tmp_path, force=True)
    assert set(snapshot(tmp_path)) == {MARKER}


def test_force_does_not_follow_links(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years")
    run = tmp_path / "run"
    earlier_run(run)
    (run / "folder").symlink_to(precious)
    (run / "file").symlink_to(precious / "thesis.txt")
    claim_output_folder(run, force=True)
    assert set(snapshot(run)) == {MARKER}
    assert set(snapshot(precious)) == {"thesis.txt"}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", ["thesis.txt", "summary.json"])
def test_never_touches_files_of_others(tmp_path, force, name):
    (tmp_path / name).write_text("not ours")
    before = snapshot(tmp_path)
    with pytest.raises(UserError, match="did not write"):
        claim_output_folder(tmp_path, force)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("path", ["file", "file/inside"])
def test_a_file_in_the_way(tmp_path, path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        claim_output_folder(tmp_path / path, force=True)
    assert (tmp_path / "file").read_text() == "x"


def test_read_only_parent(tmp_path, monkeypatch):
    def refuse(self, **_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)  # a superuser, who often runs tests, may write anywhere
    with pytest.raises(UserError, match="Read-only file system"):
        claim_output_folder(tmp_path / "run", force=False)
