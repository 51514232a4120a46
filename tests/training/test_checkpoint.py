"""A checkpoint is complete or invisible, exact to the bit, and never runs code.

This file is also the program of a process that saves and is killed.
"""

import errno
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as dcp_save

from nagnet.errors import UserError
from nagnet.models.checkpoint import load_model
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.training.checkpoint import RECORD_FILE, STATE_FOLDER, Checkpoints
from nagnet.training.distributed import World, whole_tensor
from nagnet.training.optimizer import OptimizerConfig, build_optimizers, constrain_after_step
from nagnet.training.parallel import parallelize

# 33 rows do not divide by two: shards of unequal size.
TINY = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=33, max_seq_len=16, n_directions=3)


class Run:
    """A model in training on made-up tokens, which depend on the step alone."""

    def __init__(self, config=TINY, seed=0, world=None, strategy="ddp", compiled=False):
        self.parallel = parallelize(Decoder(config, seed=seed), world or World(), strategy)
        self.model = self.parallel.model
        if compiled:
            self.model.compile_blocks()
        self.optimizers = build_optimizers(self.model, OptimizerConfig())
        constrain_after_step(self.model, *self.optimizers)
        self.n_done = 0

    def train(self, n_steps):
        """Takes steps of four rows, divided among the processes; returns the losses of this process."""
        losses = []
        world = self.parallel.world
        for _ in range(n_steps):
            generator = torch.Generator().manual_seed(self.n_done)
            tokens, targets = torch.randint(self.model.config.vocab_size, (2, 4, 9), generator=generator)
            rows = slice(4 // world.size * world.rank, 4 // world.size * (world.rank + 1))
            loss = self.parallel.summed_loss(tokens[rows], targets[rows])[0] / targets.numel()
            loss.backward()
            self.parallel.reduce_gradients()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            self.n_done += 1
            losses.append(float(loss.detach()))
        return losses

    def state(self):
        """Parameters, buffers and optimizer state by name, whole."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        tensors = dict(self.model.state_dict())
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                tensors |= {f"{names[id(parameter)]}/{key}": value for key, value in state.items()}
        return {name: whole_tensor(tensor).clone() for name, tensor in tensors.items()}

    def save(self, checkpoints, **options):
        return checkpoints.save(self.n_done, self.parallel, self.optimizers, {"step": self.n_done}, **options)

    def resume(self, checkpoints, path=None):
        values = checkpoints.load(path or checkpoints.latest(), self.parallel, self.optimizers)
        self.n_done = values["step"]
        return self


def assert_same_bits(actual, expected):
    assert actual.keys() == expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)]
    assert not different


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints")


@pytest.mark.parametrize(
    "config",
    [TINY, TINY.replace(tie_embeddings=True), TINY.replace(residual="pre_norm", sliding_windows=(4, 0))],
    ids=["norm_agnostic", "tied", "pre_norm"],
)
def test_resumes_to_the_bit(checkpoints, config):
    whole = Run(config)
    losses = whole.train(20)
    first = Run(config)
    assert first.train(10) == losses[:10]
    first.save(checkpoints)
    second = Run(config, seed=1).resume(checkpoints)
    assert_same_bits(second.state(), first.state())
    assert second.train(10) == losses[10:]
    assert_same_bits(second.state(), whole.state())
    assert (second.model.readout.weight is second.model.embedding.weight) == config.tie_embeddings


def test_layout_is_a_model_and_no_pickle(checkpoints):
    run = Run()
    run.train(1)
    path = run.save(checkpoints)
    assert path.name == "step-0000001"
    files = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    others = files - {"config.json", "model.safetensors", RECORD_FILE}
    assert others and all(name.startswith(STATE_FOLDER) and name.endswith(".safetensors") for name in others)
    tokens = torch.randint(33, (2, 9))
    assert torch.equal(load_model(path)(tokens), run.model(tokens))


def test_values_and_further_tensors_come_back(checkpoints):
    run = Run()
    run.train(1)
    values = {"tokens": 2**40, "alarms": [{"update": 3}], "score": None, "rate": 0.1}
    checkpoints.save(1, run.model, run.optimizers, values, tensors={"quantiles": torch.arange(5.0)})
    quantiles = torch.zeros(5)
    assert checkpoints.load(checkpoints.latest(), run.model, run.optimizers, {"quantiles": quantiles}) == values
    assert torch.equal(quantiles, torch.arange(5.0))


def test_parameter_without_state_stays_without(checkpoints):
    run = Run()
    run.model.blocks[1].mlp.out_proj.weight.requires_grad_(False)
    run.optimizers = build_optimizers(run.model, OptimizerConfig())
    run.train(1)
    run.model.blocks[1].mlp.out_proj.weight.requires_grad_(True)
    expected = run.state()
    run.save(checkpoints)
    assert "blocks.1.mlp.out_proj.weight/momentum_buffer" not in expected
    assert_same_bits(Run(seed=1).resume(checkpoints).state(), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_and_plain_have_the_same_names(checkpoints):
    tokens = torch.randint(33, (4, 9))
    for compiled in (True, False):
        run = Run(compiled=compiled)
        run.train(1)
        run.save(checkpoints)
        other = Run(seed=1, compiled=not compiled).resume(checkpoints)
        assert_same_bits(other.state(), run.state())
        torch.testing.assert_close(other.model(tokens), run.model(tokens))


def test_keeps_the_last_and_the_best(checkpoints):
    run = Run()
    for step, score in enumerate((3.0, 1.0, float("nan"), 1.0, 2.0, None), start=1):
        run.n_done = step
        run.save(checkpoints, score=score)
    assert checkpoints.steps() == [2, 5, 6]
    assert checkpoints.best() == checkpoints.path(2)
    assert checkpoints.latest() == checkpoints.path(6)


def test_a_run_that_went_back_drops_what_came_after(checkpoints):
    run = Run()
    for step, score in ((1, 3.0), (2, None), (5, 1.0), (9, 2.0), (2, 4.0)):
        run.n_done = step
        run.save(checkpoints, score=score)
    assert checkpoints.steps() == [2]  # 1 went when 9 was saved
    assert checkpoints.best() == checkpoints.path(2)


def test_nothing_there(checkpoints):
    assert (checkpoints.latest(), checkpoints.best(), checkpoints.steps()) == (None, None, [])
    with pytest.raises(UserError, match="keep at least 1"):
        Checkpoints("x", keep_last=0)
    with pytest.raises(UserError, match="holds no checkpoint.json; name a checkpoint"):
        Run().resume(checkpoints, Path("nowhere"))


def test_another_model_or_config_is_refused_by_its_fields(tmp_path):
    saved = Checkpoints(tmp_path, config={"optimizer": {"gate_lr": 0.1, "eps": 1.0}, "betas": (1, 2), "data": "ab"})
    run = Run()
    run.save(saved)
    other = Checkpoints(tmp_path, config={"optimizer": {"gate_lr": 0.2, "eps": 1.0}, "betas": (1, 2), "new": 3})
    with pytest.raises(UserError, match="config: optimizer.gate_lr is 0.1 there and 0.2 here; data is ab there and"):
        Run().resume(other)
    with pytest.raises(UserError, match="another model: d_model is 16 there and 32 here; "):
        Run(TINY.replace(d_model=32)).resume(saved)
    path = Run(seed=1).resume(saved).save(saved)
    (path / RECORD_FILE).write_text((path / RECORD_FILE).read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(UserError, match="has format 99; this version reads format 1"):
        Run().resume(saved)


def _first_shard(path):
    return sorted((path / STATE_FOLDER).iterdir())[0]


def _truncate(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    return file


def _flip_a_bit(path):
    file = _first_shard(path)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    return file


def _remove(path):
    file = _first_shard(path)
    file.unlink()
    return file


def _break_the_record(path):
    file = path / RECORD_FILE
    file.write_text(file.read_text()[:-20])
    return file


def _add_a_shard(path):
    file = path / STATE_FOLDER / "shard-00009-model-00001-of-00001.safetensors"
    file.write_bytes(_first_shard(path).read_bytes())
    return file


@pytest.mark.parametrize("damage", [_truncate, _flip_a_bit, _remove, _break_the_record, _add_a_shard])
def test_damaged_file_is_named_and_nothing_is_loaded(checkpoints, damage):
    run = Run()
    run.train(1)
    file = damage(run.save(checkpoints))
    other = Run(seed=1)
    before = other.state()
    with pytest.raises(UserError) as error:
        other.resume(checkpoints)
    assert str(file) in str(error.value) and "\n" not in str(error.value)
    assert_same_bits(other.state(), before)


class _Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


@pytest.mark.parametrize("name", ["model.safetensors", "shard", ".metadata", RECORD_FILE])
def test_pickle_is_refused_and_not_run(checkpoints, tmp_path, name):
    target = tmp_path / "written"
    run = Run()
    run.train(1)
    path = run.save(checkpoints)
    file = _first_shard(path) if name == "shard" else path / STATE_FOLDER / name if name == ".metadata" else path / name
    file.write_bytes(pickle.dumps(_Payload(target)))
    if name != RECORD_FILE:  # whoever forges a file forges its hash as well
        record = json.loads((path / RECORD_FILE).read_text())
        entry = {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        if name != ".metadata":
            record["files"][file.relative_to(path).as_posix()] = entry
        (path / RECORD_FILE).write_text(json.dumps(record))
    with pytest.raises(UserError, match=file.name):
        Run(seed=1).resume(checkpoints)
    assert not target.exists()
    pickle.loads(file.read_bytes())  # the payload is live
    assert target.exists()


def test_checkpoint_in_the_pickled_format_of_dcp_is_refused(checkpoints, tmp_path):
    folder = tmp_path / "foreign"
    with pytest.warns(UserWarning, match="single process"):
        dcp_save({"x": torch.zeros(2)}, storage_writer=FileSystemWriter(folder))
    (folder / ".metadata").write_bytes(pickle.dumps(_Payload(tmp_path / "written")))
    with pytest.raises(UserError, match="holds no checkpoint.json"):
        Run().resume(checkpoints, folder)
    assert not (tmp_path / "written").exists()


class _FullDisk:
    """Lets a number of files reach the disk, then none."""

    def __init__(self, monkeypatch, n_good):
        self.n_left = n_good
        self.fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, descriptor):
        self.n_left -= 1
        if self.n_left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")
        self.fsync(descriptor)


@pytest.mark.parametrize("n_good", range(5))  # weights, config, shard, record, a folder
def test_full_disk_leaves_the_checkpoint_before_and_one_line(checkpoints, monkeypatch, n_good):
    run = Run()
    run.train(1)
    run.save(checkpoints)
    expected = run.state()
    run.train(1)
    with monkeypatch.context() as patch, pytest.raises(UserError) as error:
        _FullDisk(patch, n_good)
        run.save(checkpoints)
    assert "No space left on device: somewhere" in str(error.value) and "\n" not in str(error.value)
    assert [entry.name for entry in checkpoints.folder.iterdir()] == ["step-0000001"]
    assert_same_bits(Run(seed=1).resume(checkpoints).state(), expected)
    run.save(checkpoints)
    assert checkpoints.steps() == [1, 2]


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="was not written.*Not a directory"):
        Run().save(Checkpoints(tmp_path / "file" / "checkpoints"))


def test_state_that_is_no_tensor_is_refused(checkpoints):
    run = Run()
    run.train(1)
    optimizer = run.optimizers[1]
    optimizer.state[optimizer.param_groups[0]["params"][0]]["n"] = 3
    with pytest.raises(UserError, match="AdamW keeps n as int"):
        run.save(checkpoints)
    assert not checkpoints.folder.exists()


def _save_and_die(checkpoints, run, n_operations):
    """Saves in a child process, killed with signal 9 before its n-th operation on a file; returns whether it was."""
    child = os.fork()
    if child == 0:
        counter = iter(range(n_operations))

        def watch(event, arguments):
            changes = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir")
            writes = event == "open" and not str(arguments[1]).startswith("r")
            if (changes or writes) and next(counter, None) is None:
                os.kill(os.getpid(), 9)

        sys.addaudithook(watch)
        run.save(checkpoints)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, 9), status
    return status == 9


def die_at_every_moment(folder, which):
    """Kills a save before each of its operations on files; the checkpoint before or the new one must be there."""
    checkpoints = Checkpoints(folder, keep_last=1)
    old, new = Run(), Run(seed=1)
    for run in (old, new):
        with torch.no_grad():
            for optimizer in run.optimizers:
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = torch.ones_like(parameter)
                optimizer.step()
        run.n_done = 1
    new.n_done = 1 if which == "same" else 2
    states = [old.state(), new.state()]
    seen, n_operations, killed = set(), 0, True
    while killed:
        for entry in folder.iterdir():
            shutil.rmtree(entry)
        old.save(checkpoints)
        killed = _save_and_die(checkpoints, new, n_operations)
        n_operations += 1
        latest = checkpoints.latest()
        assert latest is not None, n_operations
        for path in map(checkpoints.path, checkpoints.steps()):  # whatever is visible is complete
            loaded = Run(seed=2).resume(checkpoints, path).state()
            found = [all(torch.equal(loaded[name], tensor) for name, tensor in state.items()) for state in states]
            assert any(found), (n_operations, path)
            if path == latest:
                seen.add(found.index(True))
        new.save(checkpoints)
        assert os.listdir(folder) == [checkpoints.path(new.n_done).name], os.listdir(folder)
    assert seen == {0, 1} and n_operations > 15, (seen, n_operations)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kill_at_any_moment_of_a_save(tmp_path):
    subprocess.run([sys.executable, __file__, str(tmp_path)], check=True, timeout=240)


if __name__ == "__main__":
    torch.set_num_threads(1)  # a process with threads cannot be forked
    for which in ("next", "same"):
        die_at_every_moment(Path(sys.argv[1]), which)
