"""Checkpoints of two processes: they load into any number of them, sharded or not, and fail in all or in none.

This file is also the program of the two processes.
"""

import contextlib
import errno
import itertools
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from nagnet.errors import UserError
from nagnet.training.checkpoint import STATE_FOLDER, Checkpoints
from nagnet.training.distributed import any_rank, join_world, on_main


def _runs(world):
    """How a run may be spread: on both processes in two ways, or whole in each."""
    from test_checkpoint import Run  # beside this file, where only the two processes look

    return {
        "ddp": lambda seed=0: Run(seed=seed, world=world),
        "fsdp": lambda seed=0: Run(seed=seed, world=world, strategy="fsdp"),
        "single": lambda seed=0: Run(seed=seed),
    }


def check_loads_into_another_number_of_processes_and_another_strategy(world, folder):
    from test_checkpoint import assert_same_bits

    for saved_as, make in _runs(world).items():
        checkpoints = Checkpoints(folder / saved_as)
        run = make()
        run.train(2)
        if saved_as != "single" or world.is_main:
            path = run.save(checkpoints)
            n_files = len(list((path / STATE_FOLDER).iterdir()))
            assert n_files == (1 if saved_as == "single" else 2)  # each process writes its part
        on_main(world, lambda: None)  # waits for the single one
        expected = run.state()
        losses = run.train(1)
        after = run.state()
        for make_other in _runs(world).values():
            other = make_other(seed=1).resume(checkpoints)
            assert_same_bits(other.state(), expected)
            other.train(1)
            for name, tensor in other.state().items():
                torch.testing.assert_close(tensor, after[name], atol=2e-5, rtol=2e-4, msg=name)
        again = make(seed=1).resume(checkpoints)
        assert again.train(1) == losses
        assert_same_bits(again.state(), after)


@contextlib.contextmanager
def _full_disk_of(rank, world):
    """Lets one process's shard meet a full disk; the main one writes weights and config before it."""
    fsync, n_written = os.fsync, itertools.count(2 if world.is_main else 0, -1)

    def full(descriptor):
        if world.rank == rank and next(n_written) <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    os.fsync = full
    try:
        yield
    finally:
        os.fsync = fsync


def check_one_process_without_space_fails_the_save_of_all(world, folder):
    from test_checkpoint import assert_same_bits

    checkpoints = Checkpoints(folder / "full")
    run = _runs(world)["fsdp"]()
    run.train(1)
    run.save(checkpoints)
    expected = run.state()
    run.train(1)
    for rank in range(2):
        with pytest.raises(UserError, match="earlier checkpoints are as they were: No space left"):  # noqa: SIM117
            with _full_disk_of(rank, world):
                run.save(checkpoints)
        assert on_main(world, lambda: os.listdir(checkpoints.folder)) == ["step-0000001"]
        assert_same_bits(_runs(world)["ddp"](seed=1).resume(checkpoints).state(), expected)
    run.save(checkpoints)
    assert checkpoints.steps() == [1, 2]


def check_damage_is_an_error_in_every_process(world, folder):
    checkpoints = Checkpoints(folder / "damaged")
    run = _runs(world)["ddp"]()
    run.train(1)
    path = run.save(checkpoints)
    shard = sorted((path / STATE_FOLDER).iterdir())[1]
    on_main(world, lambda: shard.write_bytes(shard.read_bytes()[:-1]))
    with pytest.raises(UserError, match=f"{shard} is damaged"):
        run.resume(checkpoints)


CHECKS = {name: check for name, check in list(globals().items()) if name.startswith("check_")}


@pytest.fixture(scope="module")
def passed(launch, tmp_path_factory):
    """Names of the checks that passed in both processes, and their output."""
    folder = tmp_path_factory.mktemp("checks")
    results = launch(__file__, str(folder))
    record = folder / "passed.json"
    return json.loads(record.read_text()) if record.exists() else [], "\n".join(output for _, output in results)


@pytest.mark.parametrize("name", CHECKS, ids=lambda name: name.removeprefix("check_"))
def test_two_processes(passed, name):
    names, output = passed
    assert name in names, output


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    passed = []
    with join_world("cpu", timeout_seconds=120) as (world, _):
        for name, check in CHECKS.items():
            check(world, folder)
            assert not any_rank(False)  # the other passed as well
            passed.append(name)
            if world.is_main:
                (folder / "passed.json").write_text(json.dumps(passed))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
