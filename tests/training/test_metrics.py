"""Metrics files: valid JSON, whole after a kill, and after a resume like those of a run that never stopped."""

import errno
import importlib.machinery
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nagnet.errors import UserError
from nagnet.training.metrics import (
    MetricsWriter,
    TensorBoardTracker,
    check_trackers,
    numbers_by_path,
    read_metrics,
    to_json,
)


def row(step: int) -> dict:
    health = {"norm": [1.0 + step, 2.0], "quartiles": {"norm": {"q1": 1.0 + step}}}
    return {"step": step, "loss": 1 / step, "tokens": 64 * step, "arm": "nag", "done": False, "health": health}


def strict(line: str) -> dict:
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(line, parse_constant=refuse)


def scalars(folder) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_rows_come_back_and_the_trackers_get_the_numbers(tmp_path):
    with MetricsWriter(tmp_path / "run", config={"seed": 0}) as writer:
        for step in range(1, 4):
            writer.write(row(step))
    assert (
        read_metrics(tmp_path / "run") == read_metrics(tmp_path / "run" / "metrics.jsonl") == [row(1), row(2), row(3)]
    )
    seen = scalars(tmp_path / "run")
    assert set(seen) == {"loss", "tokens", "health/quartiles/norm/q1"}
    assert seen["loss"] == [(step, pytest.approx(1 / step)) for step in (1, 2, 3)]
    assert seen["health/quartiles/norm/q1"] == [(1, 2.0), (2, 3.0), (3, 4.0)]


def test_every_row_is_readable_at_once(tmp_path):
    with MetricsWriter(tmp_path, trackers=()) as writer:
        writer.write(row(1))
        assert read_metrics(tmp_path) == [row(1)]
        writer.write(row(2))
        assert len(read_metrics(tmp_path)) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_non_finite_numbers_are_valid_json_and_come_back(tmp_path):
    values = {"step": 1, "loss": math.nan, "norms": [math.inf, -math.inf, 1.0], "part": {"x": math.nan}, "t": (1, 2)}
    with MetricsWriter(tmp_path) as writer:
        writer.write(values)
    assert strict((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 1,
        "loss": "NaN",
        "norms": ["Infinity", "-Infinity", 1.0],
        "part": {"x": "NaN"},
        "t": [1, 2],
    }
    (back,) = read_metrics(tmp_path)
    assert math.isnan(back["loss"]) and math.isnan(back["part"]["x"]) and back["norms"] == [math.inf, -math.inf, 1.0]
    assert math.isnan(scalars(tmp_path)["loss"][0][1])
    assert strict(to_json({"a": [math.nan]}, indent=2)) == {"a": ["NaN"]}


@pytest.mark.parametrize("torn", [b"", b'{"step": 8, "lo', b'{"step": 8, "loss": 0.125}', b"\x00\x00\x00"])
def test_a_resumed_run_reads_like_an_uninterrupted_one(tmp_path, torn):
    """Killed after step 7, and again after step 8; both times it goes on from the checkpoint of step 5."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    with MetricsWriter(whole) as writer:
        for step in range(1, 10):
            writer.write(row(step))
    for start, end, resume_step in ((1, 8, None), (6, 9, 5), (6, 10, 5)):
        with MetricsWriter(resumed, resume_step=resume_step) as writer:
            for step in range(start, end):
                writer.write({**row(step), "loss": 100.0} if end < 10 and step > 5 else row(step))
        if end < 10:
            with open(resumed / "metrics.jsonl", "ab") as file:
                file.write(torn)
            assert read_metrics(resumed)[-1]["step"] == end - 1
    assert (resumed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert scalars(resumed) == scalars(whole)


def test_rows_without_a_step_and_a_file_without_later_rows_stay(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"note": 1}\n{"step": 2}\n')
    before = path.stat().st_mtime_ns, path.stat().st_ino
    MetricsWriter(tmp_path, trackers=(), resume_step=2).close()
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before
    MetricsWriter(tmp_path, trackers=(), resume_step=1).close()
    assert path.read_text() == '{"note": 1}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resume_where_there_are_no_metrics_yet(tmp_path):
    with MetricsWriter(tmp_path / "run", resume_step=0) as writer:
        writer.write(row(1))
    assert read_metrics(tmp_path / "run") == [row(1)] and scalars(tmp_path / "run")["loss"] == [(1, 1.0)]


KILLED = """
import sys
from nagnet.training.metrics import MetricsWriter
writer = MetricsWriter(sys.argv[1])
for step in range(1, 10**9):
    writer.write({"step": step, "loss": 1.0, "values": list(range(3000))})
    if step == 5:
        writer.flush()
        print("ready", flush=True)
        if sys.argv[2] == "wait":
            sys.stdin.read()
"""


@pytest.mark.parametrize("moment", ["wait", "write"])
def test_rows_before_a_flush_survive_a_kill(tmp_path, moment):
    command = [sys.executable, "-c", KILLED, str(tmp_path), moment]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    rows = read_metrics(tmp_path)
    assert [r["step"] for r in rows] == list(range(1, len(rows) + 1)) and len(rows) >= 5
    MetricsWriter(tmp_path, resume_step=5).close()
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    assert [step for step, _ in scalars(tmp_path)["loss"]] == [1, 2, 3, 4, 5]


def test_going_on_in_the_second_of_the_kill(tmp_path):
    """TensorBoard reads the files of one second in the order of the numbers of their processes."""
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 7):
            writer.write(row(step))
    (events,) = (tmp_path / "tensorboard").iterdir()
    kind, host = "events.out.tfevents", events.name.split(".")[4]
    events.rename(events.with_name(f"{kind}.{int(time.time())}.{host}.9999999.0"))
    MetricsWriter(tmp_path, resume_step=5).close()
    assert [step for step, _ in scalars(tmp_path)["loss"]] == [1, 2, 3, 4, 5]


def test_other_ranks_write_nothing(tmp_path):
    with MetricsWriter(tmp_path / "run", rank=1) as writer:
        writer.write(row(1))
        writer.flush()
    assert list(tmp_path.iterdir()) == []


def test_a_new_run_does_not_write_over_another(tmp_path):
    MetricsWriter(tmp_path, trackers=()).close()
    with pytest.raises(UserError, match="metrics.jsonl belongs to another run"):
        MetricsWriter(tmp_path, trackers=())


def test_damage_is_named_with_its_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(UserError, match="does not exist"):
        read_metrics(path)
    path.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(UserError, match="line 2 is damaged"):
        read_metrics(path)
    with pytest.raises(UserError, match="line 2 is damaged"):
        MetricsWriter(tmp_path, trackers=(), resume_step=1)
    path.write_text("17\n")
    with pytest.raises(UserError, match="line 1 is no JSON object"):
        read_metrics(path)


def test_unknown_and_missing_trackers_leave_no_file(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="unknown tracker mlflow; trackers are tensorboard, wandb"):
        MetricsWriter(tmp_path / "run", trackers=("tensorboard", "mlflow"))
    for name, extra in (("wandb", "wandb"), ("tensorboard", "train")):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(UserError, match=rf"{name} is not installed: pip install 'nagnet\[{extra}\]'"):
            MetricsWriter(tmp_path / "run", trackers=("tensorboard", "wandb")[extra == "wandb" :])
    monkeypatch.delitem(sys.modules, "wandb")
    (tmp_path / "wandb").mkdir()  # as wandb leaves behind
    monkeypatch.syspath_prepend(tmp_path)
    if importlib.util.find_spec("wandb").origin is None:
        with pytest.raises(UserError, match="wandb is not installed"):
            check_trackers(["wandb"])
    assert [path.name for path in tmp_path.iterdir()] == ["wandb"]


def test_wandb_gets_the_numbers_under_an_id_that_a_resume_finds_again(tmp_path, monkeypatch):
    calls = []

    class Run:
        def log(self, numbers, step):
            calls.append((step, numbers))

        def finish(self):
            calls.append("finish")

    fake = types.ModuleType("wandb")
    fake.__spec__ = importlib.machinery.ModuleSpec("wandb", None, origin="somewhere")
    fake.init = lambda **options: calls.append(options) or Run()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for resume_step in (None, 1):
        with MetricsWriter(tmp_path / "run", ("wandb",), {"seed": 3}, resume_step) as writer:
            writer.write({"step": 2, "loss": 1.5, "text": "x"})
    first, logged, end, second, *_ = calls
    assert first == second and first["config"] == {"seed": 3} and first["name"] == "run"
    assert logged == (2, {"loss": 1.5}) and end == "finish"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_an_os_error(tmp_path, monkeypatch):
    with pytest.raises(OSError) as raised, MetricsWriter(tmp_path, trackers=()) as writer:
        writer._file.close()
        monkeypatch.setattr(writer, "_file", open("/dev/full", "w", buffering=1))  # noqa: SIM115
        writer.write(row(1))
    assert raised.value.errno == errno.ENOSPC


def test_only_single_numbers_go_to_trackers():
    assert numbers_by_path(row(2)) == {"step": 2, "loss": 0.5, "tokens": 128, "health/quartiles/norm/q1": 3.0}


def test_metrics_import_neither_torch_nor_a_tracker():
    program = "import sys, nagnet.training.metrics; assert not {'torch', 'tensorboard', 'wandb'} & set(sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_flush_reaches_the_trackers(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(TensorBoardTracker, "flush", lambda self: calls.append(self))
    with MetricsWriter(tmp_path) as writer:
        writer.flush()
        assert len(calls) == 1
