"""Jobs in processes of their own, a few at a time: ``python -m nagnet.training.processes FOLDER`` is one of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nagnet.errors import UserError
from nagnet.files import write_atomically
from nagnet.training.comparison import Job, run_job
from nagnet.training.loop import interrupt_flag
from nagnet.training.text import open_text

JOB_FILE = "job.json"
LOG_FILE = "log.txt"
POLL_SECONDS = 0.2
BAD_INPUT, INTERRUPTED = 2, 130  # exit codes


def run_in_processes(jobs: Sequence[Job], n_processes: int, threads: int, echo: Callable[[str], None]) -> None:
    """Runs jobs, ``n_processes`` at a time, each with ``threads`` threads; what they print goes to their folders.

    After a failure no further job starts, and those that run go on to their end. Ctrl-C and SIGTERM are handed on:
    each job stops after its step.

    Raises:
        UserError: with the message of a job that failed, once all have ended.
        KeyboardInterrupt: after an interrupt.
    """
    waiting = list(jobs)
    running: dict[subprocess.Popen, Job] = {}
    failures: list[str] = []
    told = False
    with interrupt_flag() as received:
        try:
            while running or (waiting and not received and not failures):
                while waiting and len(running) < n_processes and not received and not failures:
                    job = waiting.pop(0)
                    running[_start(job, threads)] = job
                    echo(f"{job.label}: started, see {job.folder / LOG_FILE}")
                if received and not told:
                    told = True
                    for process in running:
                        process.send_signal(signal.SIGINT)
                for process in [process for process in running if process.poll() is not None]:
                    job = running.pop(process)
                    failures += _failure(job, process.returncode)
                    echo(f"{job.label}: {'done' if process.returncode == 0 else 'stopped'}")
                time.sleep(POLL_SECONDS)
        finally:
            for process in running:  # left only by an exception, such as a second Ctrl-C
                process.kill()
    if received:
        raise KeyboardInterrupt
    if failures:
        raise UserError(failures[0])


def _start(job: Job, threads: int) -> subprocess.Popen:
    write_atomically(job.folder / JOB_FILE, json.dumps(job.to_dict()).encode())
    with open(job.folder / LOG_FILE, "a", encoding="utf-8") as log:
        return subprocess.Popen(
            [sys.executable, "-m", __name__, str(job.folder)],
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C reaches the parent alone, which hands it on once
        )


def _failure(job: Job, code: int) -> list[str]:
    if code == 0:
        return []
    log = job.folder / LOG_FILE
    if code == BAD_INPUT:
        return [f"{job.label}: {log.read_text(encoding='utf-8').splitlines()[-1]}"]
    ended = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    return [f"{job.label} {ended}; see {log}. Finished runs are kept: the same command with --resume goes on"]


def _main(folder: Path) -> int:
    """One job, in the process that was started for it."""
    job = Job.from_dict(json.loads((folder / JOB_FILE).read_text(encoding="utf-8")))
    config = next(iter(job.arms.values()))
    try:
        run_job(job, open_text(config.data, config.model.vocab_size, config.eval_bytes))
    except UserError as error:
        print(error)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1])))
