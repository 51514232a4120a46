"""Atomic writes and the cache folder."""

from pathlib import Path

import pytest

from nagnet.files import default_cache_dir, write_atomically


def test_a_failed_write_keeps_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "file"
    write_atomically(path, b"old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


def test_files_are_as_readable_as_ordinary_ones(tmp_path):
    (tmp_path / "ordinary").write_bytes(b"")
    write_atomically(tmp_path / "atomic", b"")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def test_cache_folder(monkeypatch):
    monkeypatch.setenv("NAGNET_CACHE", "/somewhere")
    assert default_cache_dir() == Path("/somewhere")
    monkeypatch.delenv("NAGNET_CACHE")
    assert default_cache_dir() == Path.home() / ".cache" / "nagnet"
