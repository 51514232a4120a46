"""Jobs side by side: failures and interrupts reach the right place. What they run is a line of Python."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from nagnet.errors import UserError
from nagnet.training import processes
from nagnet.training.comparison import Job


@pytest.fixture
def run(tmp_path, monkeypatch, tiny_config):
    """Runs a program for each label, two at a time; returns what was printed."""
    lines: list[str] = []

    def start(programs, n_processes=2):
        def start_program(job, threads):
            job.folder.mkdir()
            with open(job.folder / processes.LOG_FILE, "w") as log:
                command = [sys.executable, "-S", "-c", programs[job.label]]
                return subprocess.Popen(command, cwd=job.folder, stdout=log, start_new_session=True)

        monkeypatch.setattr(processes, "_start", start_program)
        jobs = [Job(label, tmp_path / label, {"arm": tiny_config}) for label in programs]
        processes.run_in_processes(jobs, n_processes, 1, lines.append)

    start.lines = lines
    return start


def started(run):
    return [line.partition(":")[0] for line in run.lines if "started" in line]


def test_all_jobs_run(run):
    run({"a": "", "b": "", "c": ""})
    assert started(run) == ["a", "b", "c"]
    assert sorted(line for line in run.lines if "done" in line) == ["a: done", "b: done", "c: done"]


def test_bad_input_of_a_job_is_its_last_line_and_no_other_starts(run):
    with pytest.raises(UserError, match="^a: no such text$"):
        run({"a": "print('reading'); print('no such text'); raise SystemExit(2)", "b": "", "c": ""}, n_processes=1)
    assert started(run) == ["a"]


def test_after_a_failure_what_runs_goes_on_to_its_end(run):
    with pytest.raises(UserError, match="a ended with code 3"):
        run({"a": "raise SystemExit(3)", "b": "import time; time.sleep(1.5)", "c": ""})
    assert started(run) == ["a", "b"] and "b: done" in run.lines


@pytest.mark.parametrize(
    ("program", "message"),
    [("raise SystemExit(3)", "ended with code 3"), ("import os; os.kill(os.getpid(), 9)", "was killed by signal 9")],
)
def test_a_job_that_dies_is_named_with_its_log(run, program, message):
    with pytest.raises(UserError, match=f"a {message}; see .*log.txt.*--resume"):
        run({"a": program})


STOPS = """
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, lambda *_: (pathlib.Path("stopped").touch(), sys.exit(130)))
pathlib.Path("ready").touch()
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_reaches_every_job_and_no_other_starts(run, tmp_path, number):
    ended = threading.Event()

    def interrupt_once_ready():
        while not ended.wait(0.02):
            if all((tmp_path / label / "ready").exists() for label in "ab"):
                os.kill(os.getpid(), number)
                return

    watcher = threading.Thread(target=interrupt_once_ready)
    watcher.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run({"a": STOPS, "b": STOPS, "c": ""})
    finally:
        ended.set()
        watcher.join()
    assert started(run) == ["a", "b"]
    assert all((tmp_path / label / "stopped").exists() for label in "ab")
