"""Data sets on the hub, read from a small hub that this machine plays itself."""

import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nagnet.data.prepare import Arguments, prepare
from nagnet.data.shards import open_shards
from nagnet.data.sources import Cursor, open_source
from nagnet.errors import UserError

COMMIT = "c0ffee" + "0" * 34


class Hub(http.server.BaseHTTPRequestHandler):
    """The few answers that reading a public data set called org/name takes."""

    protocol_version = "HTTP/1.1"
    root: Path  # files of the data set
    newest: str
    requests: list[str]

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = urllib.parse.unquote(self.path.partition("?")[0])
        self.requests.append(path)
        if match := re.fullmatch(r"/api/datasets/org/name/tree/[^/]+/?(.*)", path):
            return self._send_listing(self.root / match[1])
        if match := re.fullmatch(r"/api/datasets/org/name(?:/revision/([^/]+))?", path):
            files = [{"rfilename": str(file.relative_to(self.root))} for file in self.root.rglob("*.*")]
            return self._send(
                json.dumps({"id": "org/name", "sha": match[1] or self.newest, "siblings": files, "tags": []}).encode()
            )
        match = re.fullmatch(r"/datasets/org/name/resolve/[^/]+/(.+)", path)
        if match and (self.root / match[1]).is_file():
            return self._send_file((self.root / match[1]).read_bytes())
        self._send(b"{}", 404, {"X-Error-Code": "EntryNotFound" if "/resolve/" in path else "RepoNotFound"})

    def _send_listing(self, folder: Path):
        entries = [
            {
                "type": "directory" if entry.is_dir() else "file",
                "oid": hashlib.sha1(entry.name.encode()).hexdigest(),
                "size": 0 if entry.is_dir() else entry.stat().st_size,
                "path": str(entry.relative_to(self.root)),
            }
            for entry in sorted(folder.iterdir())
        ]
        self._send(json.dumps(entries).encode())

    def _send_file(self, content: bytes):
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            return self._send(content[first : last + 1], 206, headers)
        self._send(content, 200, headers)

    def _send(self, content: bytes, status: int = 200, headers: dict[str, str] | None = None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with one data set of 3 files of 400 rows."""
    datasets, huggingface_hub = pytest.importorskip("datasets"), pytest.importorskip("huggingface_hub")
    root = tmp_path / "hub" / "data"
    root.mkdir(parents=True)
    for k in range(3):
        rows = [f"file {k}, row {row}: the cat sat on the mat" for row in range(400)]
        pq.write_table(pa.table({"id": range(400), "text": rows}), root / f"train-{k}.parquet", row_group_size=100)
    handler = type("TestHub", (Hub,), {"root": tmp_path / "hub", "newest": COMMIT, "requests": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", address)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    yield handler
    server.shutdown()
    server.server_close()


def test_a_data_set_is_streamed_in_order_from_any_row(hub):
    source = open_source("hf:org/name")
    assert (source.revision, source.fingerprint) == (COMMIT, f"org/name@{COMMIT}")
    records = list(source.read())
    assert [record.text for record in records] == [
        f"file {k}, row {row}: the cat sat on the mat" for k in range(3) for row in range(400)
    ]
    for i in (0, 255, 256, 799, 800, 1100):
        cursor = Cursor(*json.loads(json.dumps(records[i].cursor)))
        assert [record.text for record in source.read(cursor)] == [record.text for record in records[i:]]


def test_only_what_is_read_is_fetched(hub):
    records = list(islice(open_source("hf:org/name").read(), 100))
    assert len(records) == 100
    assert not any("train-2" in request for request in hub.requests)


def test_an_interrupted_data_set_goes_on_at_the_same_commit(hub, tmp_path):
    arguments = Arguments("hf:org/name", vocab_size=270, shard_tokens=5_000)
    prepare(arguments, tmp_path / "whole")

    class Stop(Exception):
        pass

    def stop(totals, n_bytes):
        if totals.documents > 600:
            raise Stop

    with pytest.raises(Stop):
        prepare(arguments, tmp_path / "out", progress=stop)
    hub.newest = "f" * 40
    prepare(arguments, tmp_path / "out")
    assert open_shards(tmp_path / "out", verify=True).manifest == open_shards(tmp_path / "whole").manifest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "hf:org/nothing"}, "the Hugging Face hub has no data set org/nothing"),
        ({"subset": "small"}, "'small' not found.*check --subset"),
        ({"split": "test"}, "test.*check --subset, --split"),
        ({"column": "body"}, "org/name has no column body; choose one of id, text"),
        ({"column": "id"}, "column id of org/name holds int64, not text"),
    ],
    ids=str,
)
def test_what_the_hub_does_not_have_is_one_line(hub, tmp_path, change, message):
    with pytest.raises(UserError, match=message) as caught:
        prepare(replace(Arguments("hf:org/name", vocab_size=270), **change), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
