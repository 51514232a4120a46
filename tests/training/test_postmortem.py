"""A loss or gradient that is not finite: what is named, what is saved, and what happens on a full disk."""

import errno
import json
import math
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from nagnet.models.checkpoint import load_model
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.training import postmortem
from nagnet.training.postmortem import write_postmortem

BATCH = (torch.arange(48).reshape(4, 12) % 32, torch.arange(1, 49).reshape(4, 12) % 32)


def build(residual="norm_agnostic", **changes) -> Decoder:
    shape = {"d_model": 16, "n_layers": 6, "n_heads": 2, "vocab_size": 32, "max_seq_len": 16, "n_directions": 3}
    return Decoder(ModelConfig(residual=residual, **shape | changes), seed=0)


def failed(model: Decoder) -> float:
    model.zero_grad()
    loss = model.loss(*BATCH)
    loss.backward()
    return loss.item()


def poison(model: Decoder, name: str, value: float = math.nan) -> None:
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0] = value


def read_report(folder: Path) -> dict:
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads((folder / "post-mortem" / "report.json").read_text(), parse_constant=refuse)


@pytest.mark.parametrize("residual", ["norm_agnostic", "pre_norm", "post_norm", "none"])
def test_the_update_that_failed_first_is_named_and_all_is_saved(tmp_path, residual):
    model = build(residual)
    poison(model, "blocks.4.attention.out_proj.weight")
    loss = failed(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradient = model.blocks[5].mlp.out_proj.weight.grad.clone()
    rows = [{"step": 11, "loss": math.inf}]
    line = write_postmortem(tmp_path, model, 12, loss, BATCH, rows, gradient_norm=math.nan)

    report = read_report(tmp_path)
    n_bad = len(report["gradients"])
    assert line == (
        f"loss is nan at step 12: first non-finite at update 9 (attention of block 5); "
        f"gradients of {n_bad} tensors, the first {report['gradients'][0]}; "
        f"parameter blocks.4.attention.out_proj.weight; see {tmp_path}/post-mortem/report.json"
    )
    assert n_bad == sum(not p.grad.isfinite().all() for p in model.parameters()) > 1
    assert (report["step"], report["loss"], report["gradient_norm"]) == (12, "NaN", "NaN")
    assert (report["update_index"], report["part"], report["rank"], report["not_saved"]) == (9, "branch", 0, {})
    assert report["last_rows"] == [{"step": 11, "loss": "Infinity"}]
    assert report["statistics"]["update"] == 9 and report["statistics"]["norm"] == "NaN"
    assert all(math.isfinite(norm) for norm in report["health"]["norm"][:8])
    assert report["versions"]["torch"] == metadata.version("torch")

    batch = load_file(tmp_path / "post-mortem" / "batch.safetensors")
    again = load_model(tmp_path / "post-mortem" / "model")
    assert torch.equal(batch["inputs"], BATCH[0]) and torch.equal(batch["targets"], BATCH[1])
    assert again.loss(batch["inputs"], batch["targets"]).isnan()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(model.blocks[5].mlp.out_proj.weight.grad, gradient, rtol=0, atol=0, equal_nan=True)
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert files == [
        "post-mortem/batch.safetensors",
        "post-mortem/model/config.json",
        "post-mortem/model/model.safetensors",
        "post-mortem/report.json",
    ]


@pytest.mark.parametrize(
    ("name", "place", "part"),
    [
        ("embedding.weight", "the embedding", None),
        ("stream.updates.3.alpha", "update 4 (MLP of block 2)", "gain"),
        ("blocks.0.mlp.up_proj.weight", "update 2 (MLP of block 1)", "branch"),
        ("readout.weight", "the readout", None),
    ],
)
def test_places_other_than_attention(tmp_path, name, place, part):
    model = build()
    poison(model, name)
    line = write_postmortem(tmp_path, model, 3, failed(model), BATCH)
    report = read_report(tmp_path)
    assert f"first non-finite at {place};" in line
    assert (report["place"], report["part"], report["parameters"]) == (place, part, [name])


def test_a_norm_that_overflows_shows_as_state_or_readout(tmp_path):
    model = build(init_encode_gain=1e38)
    nn.init.constant_(model.stream.updates[0].alpha, 1e3)
    nn.init.normal_(model.blocks[0].attention.out_proj.weight)
    loss = failed(model)
    assert not math.isfinite(loss)
    assert "first non-finite at the readout" in write_postmortem(tmp_path, model, 3, loss, BATCH)
    assert read_report(tmp_path)["health"]["norm"][0] > 1e39


def test_a_bad_gradient_of_a_finite_loss(tmp_path):
    model = build()
    loss = failed(model)
    model.blocks[2].mlp.up_proj.weight.grad[0, 0] = math.inf
    line = write_postmortem(tmp_path, model, 7, loss, BATCH, gradient_norm=math.inf)
    assert line.startswith(
        "gradient norm is inf at step 7: the forward pass is finite when it is run again; "
        "gradient blocks.2.mlp.up_proj.weight; see "
    )
    report = read_report(tmp_path)
    assert report["place"] is None and report["loss"] == pytest.approx(loss)
    assert len(report["health"]["norm"]) == 12


@pytest.mark.parametrize("bad", [[3], [1, 3]])
def test_the_part_of_the_batch_that_failed_first_is_told(tmp_path, bad):
    model = build()
    model.embedding.weight.data[31] = math.nan
    inputs = BATCH[0] % 31
    inputs[bad, 4] = 31
    write_postmortem(tmp_path, model, 7, math.nan, (inputs, BATCH[1]), micro_batches=4)
    report = read_report(tmp_path)
    assert report["micro_batch"] == bad[0] and report["place"] == "the embedding"
    assert [value == "NaN" for value in report["micro_batch_loss"]] == [part in bad for part in range(4)]


@pytest.mark.parametrize("names", [["report.json", "batch.safetensors", "model.safetensors"], ["model.safetensors"]])
def test_the_line_still_comes_when_the_disk_is_full(tmp_path, monkeypatch, names):
    model = build()
    poison(model, "embedding.weight")
    loss = failed(model)
    write_postmortem(tmp_path, build(), 1, math.nan, BATCH)
    write = postmortem.write_atomically

    def full(path, content):
        if path.name in names:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, content)

    monkeypatch.setattr("nagnet.training.postmortem.write_atomically", full)
    monkeypatch.setattr("nagnet.models.checkpoint.write_atomically", full)
    line = write_postmortem(tmp_path, model, 12, loss, BATCH)
    assert line.startswith("loss is nan at step 12: first non-finite at the embedding; ")
    report = tmp_path / "post-mortem" / "report.json"
    if "report.json" in names:
        assert line.endswith(f"{report} could not be written (No space left on device)")
        assert not report.exists(), "an earlier report would be about another failure"
    else:
        assert line.endswith(f"see {report}, without model (No space left on device)")
        assert read_report(tmp_path)["not_saved"] == {"model": "No space left on device"}


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    line = write_postmortem(tmp_path / "file", build(), 1, math.nan, BATCH)
    assert "could not be written (Not a directory)" in line


def test_a_run_that_cannot_be_repeated_is_reported_all_the_same(tmp_path, monkeypatch):
    model = build()
    model.readout.weight.grad = torch.full_like(model.readout.weight, math.nan)

    def loss(inputs, targets):
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(model, "loss", loss)
    line = write_postmortem(tmp_path, model, 12, math.nan, BATCH)
    assert "could not be run again (RuntimeError: out of memory); gradient readout.weight; see " in line
    assert read_report(tmp_path)["error"] == "RuntimeError: out of memory"


SHARDED = """
import json, math, sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from nagnet import Decoder, ModelConfig
from nagnet.diagnostics import stream_health
from nagnet.training.health import gradient_norms
from nagnet.training.optimizer import OptimizerConfig, build_optimizers
from nagnet.training.postmortem import write_postmortem

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)

def build():
    model = Decoder(ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=32, n_directions=3), seed=0)
    generator = torch.Generator().manual_seed(1)
    for block in model.blocks:
        for module in (block.attention, block.mlp):
            torch.nn.init.normal_(module.out_proj.weight, std=0.3, generator=generator)
    return model

tokens = torch.arange(64).reshape(4, 16) % 31

def measure(model):
    model.zero_grad()
    model.loss(tokens, tokens.roll(1, 1)).backward()
    norms = gradient_norms(build_optimizers(model, OptimizerConfig()))
    return [norms.total, *norms.by_role.values(), *stream_health(model, tokens).norm]

plain = measure(build())
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
model = build()
ignored = set(model.stream.parameters())  # FSDP takes no scalars
for block in model.blocks:
    fully_shard(block)
fully_shard(model, ignored_params=ignored)
for name in ("trunk", "summed_loss"):
    register_fsdp_forward_method(model, name)
# Twice: a measurement must leave the parameters as it found them, for the step and the gradients that follow.
sharded = [measure(model), measure(model)]

with torch.no_grad():
    model.embedding.weight.to_local()[-1] = math.nan  # row 31 is in the part of rank 1, and in its batch alone
    if rank == 0:
        model.embedding.weight.to_local()[-1] = 0.0
inputs = tokens.clone()
inputs[0, 5] += 31 * rank - tokens[0, 5] * rank
line = write_postmortem(folder, model, 4, math.nan, (inputs, inputs), micro_batches=2)
print(json.dumps({"plain": plain, "sharded": sharded, "line": line}))
dist.destroy_process_group()
"""


def test_sharded_over_two_processes(tmp_path):
    """Norms are those of the whole gradients, and the process that failed is the one whose batch is saved."""
    commands = [[sys.executable, "-c", SHARDED, str(rank), str(tmp_path)] for rank in range(2)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for command in commands]
    try:
        results = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), [error.decode() for _, error in results]
    first, second = (json.loads(output.splitlines()[-1]) for output, _ in results)
    for measured in first["sharded"] + second["sharded"]:
        assert measured == pytest.approx(first["plain"], rel=1e-5)
    what = "loss is nan at step 4: first non-finite at the embedding; parameter embedding.weight"
    assert first["line"] == f"{what}; see {tmp_path}/post-mortem/report.json" and second["line"] == what
    report = read_report(tmp_path)
    assert report["rank"] == 1
    inputs = load_file(tmp_path / "post-mortem" / "batch.safetensors")["inputs"]
    assert inputs[0, 5] == 31 and (inputs == 31).sum() == 1
    model = load_model(tmp_path / "post-mortem" / "model")
    assert model.embedding.weight[31].isnan().all() and model.embedding.weight[:31].isfinite().all()
    assert model.loss(inputs[1:], inputs[1:]).isfinite()
