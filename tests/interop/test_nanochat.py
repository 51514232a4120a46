"""Imported checkpoints compute what the code they come from computed, and a pickle's code never runs."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nagnet.cli.application import run
from nagnet.data.tokenizer import train_tokenizer
from nagnet.errors import UserError
from nagnet.interop.nanochat import import_nanochat
from nagnet.models.checkpoint import load_model

SHARED = Path(__file__).parents[3] / "shared" / "data" / "nanochat_checkpoints"
ARCHS = ("gpt", "nag-gpt")
SHAPE = {"sequence_len": 32, "vocab_size": 70, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32}
PADDED_ROWS = 128


@pytest.fixture
def original():
    """The folder of an original checkpoint, whose logits and loss the code that trained it wrote down."""

    def folder(arch):
        if not SHARED.is_dir():
            pytest.skip(f"{SHARED} is not on this machine")
        return SHARED / arch

    return folder


def random_checkpoint(arch, shape=SHAPE, rows=PADDED_ROWS) -> dict[str, torch.Tensor]:
    """Weights with the names of that code; nothing centred, no two alike."""
    d, head = shape["n_embd"], shape["n_embd"] // shape["n_head"]
    tensors = {"transformer.wte.weight": torch.randn(rows, d) + 0.3, "lm_head.weight": torch.randn(rows, d) + 0.2}
    for layer in range(shape["n_layer"]):
        prefix = f"transformer.h.{layer}."
        shapes = {"attn.c_q": d, "attn.c_k": head * shape["n_kv_head"], "attn.c_v": head * shape["n_kv_head"]}
        for name, out in (shapes | {"attn.c_proj": d, "mlp.c_fc": 4 * d}).items():
            tensors[f"{prefix}{name}.weight"] = torch.randn(out, d) / d**0.5
        tensors[f"{prefix}mlp.c_proj.weight"] = torch.randn(d, 4 * d) / d**0.5
        if arch == "nag-gpt":
            for branch in ("attn_branch", "mlp_branch"):
                tensors[f"{prefix}{branch}.m_down.weight"] = torch.randn(32, d) / d**0.5
                tensors[f"{prefix}{branch}.m_down.bias"] = torch.randn(32)
                tensors[f"{prefix}{branch}.coef"] = torch.randn(32)
                tensors[f"{prefix}{branch}.beta"] = torch.randn(1)
                tensors[f"{prefix}{branch}.alpha"] = torch.randn(1)
    return tensors | ({"g_log_encode": torch.randn(1)} if arch == "nag-gpt" else {})


def write_checkpoint(folder: Path, arch, tensors, shape=SHAPE, step=10, **meta) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(tensors, folder / f"model_{step:06d}.pt")
    meta = {"step": step, "model_config": shape, "user_config": {"arch": arch}} | meta
    (folder / f"meta_{step:06d}.json").write_text(json.dumps(meta))
    return folder


def unit(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1.1920929e-7)


def attend(tensors, prefix, x, shape, window):
    """Attention of one layer, written from the description of the model, one query head after another."""
    k = shape["n_embd"] // shape["n_head"]
    time = x.shape[1]
    angles = torch.outer(torch.arange(time).float(), 1e5 ** -(torch.arange(0, k, 2).float() / k))
    cos, sin = angles.cos(), angles.sin()
    distance = torch.arange(time)[:, None] - torch.arange(time)
    hidden = (distance < 0) | (distance > window)

    def turned(name, head):
        part = (x @ tensors[f"{prefix}attn.{name}.weight"].T)[..., head * k : (head + 1) * k]
        first, second = part[..., : k // 2], part[..., k // 2 :]
        return 1.2 * unit(torch.cat([first * cos + second * sin, second * cos - first * sin], -1))

    heads = []
    for head in range(shape["n_head"]):
        shared = head // (shape["n_head"] // shape["n_kv_head"])
        scores = turned("c_q", head) @ turned("c_k", shared).mT / k**0.5
        values = (x @ tensors[f"{prefix}attn.c_v.weight"].T)[..., shared * k : (shared + 1) * k]
        heads.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values)
    return torch.cat(heads, -1) @ tensors[f"{prefix}attn.c_proj.weight"].T


def forward(arch, tensors, ids, shape, windows):
    """The whole model, from the same description."""
    d = shape["n_embd"]
    embedding = tensors["transformer.wte.weight"][ids]
    if arch == "gpt":
        x = unit(embedding)
    else:
        rho = embedding.norm(dim=-1, keepdim=True) / d**0.5
        x, log_norm = embedding / rho, rho.log() + tensors["g_log_encode"]
    for layer in range(shape["n_layer"]):
        prefix = f"transformer.h.{layer}."

        def attention(y, prefix=prefix, window=windows[layer]):
            return attend(tensors, prefix, y, shape, window)

        def mlp(y, prefix=prefix):
            hidden = (y @ tensors[f"{prefix}mlp.c_fc.weight"].T).clamp(min=0).square()
            return hidden @ tensors[f"{prefix}mlp.c_proj.weight"].T

        for sublayer, branch in ((attention, "attn_branch"), (mlp, "mlp_branch")):
            if arch == "gpt":
                x = x + sublayer(unit(x))
                continue
            own = {name: tensors[f"{prefix}{branch}.{name}"] for name in ("coef", "beta", "alpha")}
            logits = x @ tensors[f"{prefix}{branch}.m_down.weight"].T + tensors[f"{prefix}{branch}.m_down.bias"]
            u = (own["coef"].softmax(0) * logits.sigmoid()).sum(-1, keepdim=True).clamp(min=1e-6)
            gain = own["alpha"] * u ** F.softplus(own["beta"])
            y = sublayer(x)
            y = y - y.mean(-1, keepdim=True)
            y = y - x * (y * x).sum(-1, keepdim=True) / x.square().sum(-1, keepdim=True)
            x, log_norm = unit(x + gain * unit(y)), log_norm + 0.5 * torch.log1p(gain**2)
    if arch == "gpt":
        return 15 * torch.tanh((unit(x) @ tensors["lm_head.weight"].T)[..., : shape["vocab_size"]] / 15)
    return (x @ tensors["lm_head.weight"].T)[..., : shape["vocab_size"]] / d * log_norm.exp()


@pytest.mark.parametrize("arch", ARCHS)
def test_logits_and_loss_of_the_original_code(arch, original):
    expected = np.load(original(arch) / "expected.npz")
    model = import_nanochat(original(arch)).model
    ids = torch.from_numpy(expected["ids"])
    logits = model(ids).detach().numpy()
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)
    assert model.loss(ids[:, :-1], ids[:, 1:]).item() == pytest.approx(float(expected["loss"]), abs=1e-5)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_description_used_below_is_that_of_the_original_code(arch, original):
    expected = np.load(original(arch) / "expected.npz")
    (file,) = original(arch).glob("model_*.pt")
    shape = json.loads(next(original(arch).glob("meta_*.json")).read_text())["model_config"]
    tensors = torch.load(file, weights_only=True)
    logits = forward(arch, tensors, torch.from_numpy(expected["ids"]), shape, [99, 99, 99])
    np.testing.assert_allclose(logits.numpy(), expected["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("prefix", ["", "_orig_mod."], ids=["plain", "compiled"])
def test_grouped_heads_and_a_padded_vocabulary(arch, dtype, prefix, tmp_path):
    tensors = random_checkpoint(arch)
    # The padding shouts: where it took part, every softmax would be its own.
    tensors["lm_head.weight"][SHAPE["vocab_size"] :] = 50.0
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    written = {prefix + name: tensor for name, tensor in tensors.items()}
    model = import_nanochat(write_checkpoint(tmp_path / "there", arch, written)).model
    ids = torch.randint(SHAPE["vocab_size"], (2, 20))
    wide = {name: tensor.float() for name, tensor in tensors.items()}
    expected = forward(arch, wide, ids, SHAPE, [99, 99])
    assert model.config.n_kv_heads == 2 and model.config.vocab_size == 70
    torch.testing.assert_close(model(ids).detach(), expected, rtol=1e-4, atol=1e-4)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.readout.weight, wide["lm_head.weight"][:70])  # neither centred nor normalised
    assert torch.equal(model.embedding.weight, wide["transformer.wte.weight"][:70])


@pytest.mark.parametrize("arch", ARCHS)
def test_short_windows(arch, tmp_path):
    shape = SHAPE | {"sequence_len": 600, "n_layer": 3, "window_pattern": "SL"}
    tensors = random_checkpoint(arch, shape)
    model = import_nanochat(write_checkpoint(tmp_path / "there", arch, tensors, shape)).model
    assert model.config.sliding_windows == (257, 0, 0)  # a quarter, rounded up to 128s, and the query itself
    ids = torch.randint(SHAPE["vocab_size"], (1, 400))
    expected = forward(arch, tensors, ids, shape, [256, 600, 600])
    torch.testing.assert_close(model(ids).detach(), expected, rtol=1e-4, atol=1e-4)
    assert (forward(arch, tensors, ids, shape, [600] * 3) - expected).abs().max() > 1e-2


def test_the_model_folder_and_its_record(tmp_path, capsys):
    there = write_checkpoint(tmp_path / "there", "nag-gpt", random_checkpoint("nag-gpt"), step=5)
    write_checkpoint(there, "nag-gpt", random_checkpoint("nag-gpt"), step=20, val_bpb=0.9)
    out = tmp_path / "out"
    assert run(["import", "nanochat", str(there), str(out), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["step"] == 20 and record["arch"] == "nag-gpt" and record["meta"]["val_bpb"] == 0.9
    assert json.loads((out / "import.json").read_text()) == record
    ids = torch.randint(70, (1, 9))
    again = import_nanochat(there).model
    assert torch.equal(load_model(out)(ids), again(ids))
    assert record["parameters"] == sum(parameter.numel() for parameter in again.parameters())
    assert run(["import", "nanochat", str(there), str(out)]) == 2
    assert "--force" in capsys.readouterr().err
    assert run(["import", "nanochat", str(there), str(out), "--step", "5", "--force"]) == 0
    assert "at step 5" in capsys.readouterr().out


def test_an_imported_model_is_scored_like_any_other(tmp_path, capsys):
    shape = SHAPE | {"vocab_size": 270}
    there = write_checkpoint(tmp_path / "there", "nag-gpt", random_checkpoint("nag-gpt", shape, rows=320), shape)
    (tmp_path / "text").mkdir()
    for number in range(3):
        (tmp_path / "text" / f"{number}.txt").write_text(f"a stream of words and {number} more words " * 9)
    train_tokenizer(["a stream of words"] * 20, 270).save(tmp_path / "tokenizer.json")
    assert run(["import", "nanochat", str(there), str(tmp_path / "out")]) == 0
    capsys.readouterr()
    found = []
    for option in ((), ("--freeze-scale",)):
        arguments = ("--tokenizer", tmp_path / "tokenizer.json", "--data", tmp_path / "text", "--whole", "--json")
        assert run(["evaluate", "bpb", *map(str, (tmp_path / "out", *arguments, *option)), "--device", "cpu"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["seq_len"] == 32 and found[0]["bytes"] == 3 * 9 * 35
    assert found[0]["bits_per_byte"] > 1 and found[1]["bits_per_byte"] != found[0]["bits_per_byte"]


class WritesAFile:
    """What a hostile checkpoint looks like: reading it runs a function."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.write_text, (self.path, "the code of the pickle has run"))


@pytest.mark.parametrize(
    "write", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))], ids=["torch", "pickle"]
)
def test_the_code_of_a_pickle_never_runs(write, tmp_path, capsys):
    proof = tmp_path / "proof"
    there = write_checkpoint(tmp_path / "there", "gpt", {})
    write(random_checkpoint("gpt") | {"extra": WritesAFile(proof)}, there / "model_000010.pt")
    assert run(["import", "nanochat", str(there), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "is refused" in error and len(error.strip().splitlines()) == 1
    assert not proof.exists() and not (tmp_path / "out").exists()
    payload = pickle.dumps(WritesAFile(proof))
    pickle.loads(payload)
    assert proof.exists(), "the test's payload does not work, so it proves nothing"


def cut_short(folder):
    file = folder / "model_000010.pt"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def change(name, tensor):
    def act(folder):
        file = folder / "model_000010.pt"
        tensors = torch.load(file, weights_only=True)
        tensors.pop(name, None)
        torch.save(tensors if tensor is None else tensors | {name: tensor}, file)

    return act


def meta(**changes):
    def act(folder):
        file = folder / "meta_000010.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return act


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_short, "model_000010.pt is damaged"),
        (lambda folder: (folder / "model_000010.pt").write_text("hello"), "model_000010.pt is damaged"),
        (lambda folder: (folder / "model_000010.pt").write_text(""), "model_000010.pt is damaged"),
        (lambda folder: (folder / "model_000010.pt").unlink(), "holds no model_STEP.pt"),
        (lambda folder: torch.save([1], folder / "model_000010.pt"), "no named tensors"),
        (lambda folder: (folder / "meta_000010.json").unlink(), "meta_000010.json is missing"),
        (lambda folder: (folder / "meta_000010.json").write_text("{"), "meta_000010.json is damaged"),
        (lambda folder: (folder / "meta_000010.json").write_text("[]"), "meta_000010.json is damaged"),
        (meta(user_config={"arch": "mamba"}), "user_config.arch is 'mamba'; known architectures are gpt, nag-gpt"),
        (meta(user_config={"arch": "nag-gpt"}), "lacks g_log_encode, transformer.h.0.attn_branch.alpha"),
        (meta(user_config=None), "user_config.arch is None"),
        (meta(model_config={}), "model_config.sequence_len is None"),
        (meta(model_config=SHAPE | {"n_head": 0}), "model_config.n_head is 0"),
        (meta(model_config=SHAPE | {"n_head": 3}), "n_heads 3"),
        (meta(model_config=SHAPE | {"window_pattern": "SX"}), "window_pattern is 'SX'"),
        (meta(model_config=SHAPE | {"value_embeds": 1}), "model_config has value_embeds"),
        (meta(model_config=SHAPE | {"n_layer": 1}), "has transformer.h.1.attn.c_k.weight"),
        (meta(model_config=SHAPE | {"n_layer": 10**9}), "lacks transformer.h.10.attn.c_k.weight"),
        (meta(model_config=SHAPE | {"vocab_size": 10**12}), "transformer.wte.weight is [128, 32]"),
        (change("transformer.h.0.mlp.c_fc.weight", torch.ones(())), "c_fc.weight is a single number"),
        (meta(model_config=SHAPE | {"vocab_size": 200}), "transformer.wte.weight is [128, 32], but its meta file says"),
        (change("lm_head.weight", None), "lacks lm_head.weight"),
        (change("lm_head.weight", torch.zeros(128, 31)), "lm_head.weight is [70, 31]"),
        (change("value_embeds.0.weight", torch.zeros(3)), "has value_embeds.0.weight"),
        (change("lm_head.weight", torch.zeros(128, 32, dtype=torch.int64)), "'lm_head.weight' is no tensor of weights"),
        (change("_orig_mod.lm_head.weight", torch.zeros(128, 32)), "both with and without _orig_mod."),
    ],
)
def test_bad_checkpoints_are_one_line_and_write_nothing(damage, message, tmp_path, capsys):
    there = write_checkpoint(tmp_path / "there", "gpt", random_checkpoint("gpt"))
    damage(there)
    assert run(["import", "nanochat", str(there), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1, error
    assert not (tmp_path / "out").exists()


def test_a_step_that_is_not_there(tmp_path):
    there = write_checkpoint(tmp_path / "there", "gpt", random_checkpoint("gpt"))
    with pytest.raises(UserError, match="no checkpoint of step 3; it has 10"):
        import_nanochat(there, step=3)
    with pytest.raises(UserError, match="is no folder"):
        import_nanochat(tmp_path / "nothing")
