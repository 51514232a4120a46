"""Every parameter has one role, and Muon here is torch's Muon."""

import copy

import pytest
import torch
from torch import nn

from nagnet.errors import UserError
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.nn.readout import ReadoutConfig
from nagnet.nn.residual import RESIDUAL_STREAMS, NormAgnosticResidual
from nagnet.training import muon
from nagnet.training.muon import Muon, orthogonalize
from nagnet.training.optimizer import (
    OptimizerConfig,
    build_optimizers,
    constrain_after_step,
    describe_groups,
    parameter_groups,
    parameter_roles,
    scale_rates,
)

TINY = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=32, max_seq_len=16, n_directions=3)


@pytest.mark.parametrize("residual", list(RESIDUAL_STREAMS))
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_parameter_is_in_exactly_one_group(residual, tied):
    model = Decoder(TINY.replace(residual=residual, tie_embeddings=tied), seed=0)
    grouped = [id(p) for group in parameter_groups(model) for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())


def test_only_sublayer_weights_are_matrices():
    roles = parameter_roles(Decoder(TINY, seed=0))
    assert {name.split(".")[0] for name, role in roles.items() if role == "matrix"} == {"blocks"}
    assert all(role == "gate" for name, role in roles.items() if name.startswith("stream.updates"))
    assert roles["embedding.weight"] == "embedding"
    assert roles["readout.weight"] == "head"
    assert roles["stream.log_encode_gain"] == "scalar"


def test_tied_head_never_reaches_muon():
    optimizers = build_optimizers(Decoder(TINY.replace(tie_embeddings=True), seed=0), OptimizerConfig())
    matrices = next(optimizer for optimizer in optimizers if isinstance(optimizer, Muon))
    assert all(name.startswith("blocks.") for group in matrices.param_groups for name in group["names"])


def test_roles_in_a_foreign_model():
    model = nn.Module()
    model.wte = nn.Embedding(40, 8)
    model.attn = nn.Linear(8, 8)
    model.residual = NormAgnosticResidual(8, update_index=1, n_directions=2)
    model.lm_head = nn.Linear(8, 40, bias=False)
    roles = parameter_roles(model)
    assert roles["lm_head.weight"] == "head"
    assert roles["attn.weight"] == "matrix"
    assert roles["attn.bias"] == "scalar"
    assert roles["residual.modulator.weight"] == "gate"


def test_a_matrix_that_happens_to_have_the_tables_shape_is_no_head():
    roles = parameter_roles(Decoder(ModelConfig(d_model=16, n_layers=1, n_heads=2, vocab_size=64), seed=0))
    assert roles["blocks.0.mlp.up_proj.weight"] == "matrix"  # [64, 16], like the table
    assert [name for name, role in roles.items() if role == "head"] == ["readout.weight"]


def test_stacks_of_matrices_are_matrices_and_kernels_are_not():
    model = nn.Module()
    model.experts = nn.Parameter(torch.zeros(4, 8, 6))
    model.convolution = nn.Conv1d(8, 8, 3, groups=8)
    model.cube = nn.Parameter(torch.zeros(2, 2, 2, 2))
    roles = parameter_roles(model)
    assert roles == {
        "experts": "matrix",
        "cube": "scalar",
        "convolution.weight": "scalar",
        "convolution.bias": "scalar",
    }


def test_constrain_after_step_wants_a_model_that_can():
    layer = nn.Linear(2, 2)
    with pytest.raises(UserError, match="constrain_"):
        constrain_after_step(layer, torch.optim.SGD(layer.parameters(), lr=0.1))


def test_gates_and_scalars_are_not_decayed_unless_asked():
    decay = {g["role"]: g.get("weight_decay") for g in parameter_groups(Decoder(TINY, seed=0))}
    assert decay["gate"] == decay["scalar"] == 0.0
    asked = parameter_groups(Decoder(TINY, seed=0), gate={"weight_decay": 0.1})
    assert next(g for g in asked if g["role"] == "gate")["weight_decay"] == 0.1


def test_unknown_role_is_named():
    with pytest.raises(UserError, match="gates.*gate"):
        parameter_groups(Decoder(TINY, seed=0), gates={"lr": 1.0})


@pytest.mark.parametrize(("rows", "rate"), [("unit", 0.1), ("free", 0.02)])
def test_head_rate_fits_the_size_of_its_rows(rows, rate):
    model = Decoder(TINY.replace(readout=ReadoutConfig(rows=rows)), seed=0)
    table = describe_groups(build_optimizers(model, OptimizerConfig(unit_head_lr=0.1, free_head_lr=0.02)))
    assert next(row for row in table if row["role"] == "head")["lr"] == rate


def test_decay_and_betas_by_role():
    config = OptimizerConfig(
        matrix_momentum=0.9,
        matrix_weight_decay=0.094,
        embedding_weight_decay=0.001,
        head_weight_decay=0.01,
        gate_betas=(0.7, 0.8),
        eps=1e-9,
    )
    optimizers = build_optimizers(Decoder(TINY, seed=0), config)
    rows = {row["role"]: row for row in describe_groups(optimizers)}
    assert {role: row["weight_decay"] for role, row in rows.items()} == {
        "matrix": 0.094,
        "embedding": 0.001,
        "head": 0.01,
        "gate": 0.0,
        "scalar": 0.0,
    }
    assert {role: row["averages"] for role, row in rows.items()} == {
        "matrix": [0.9],
        "embedding": [0.8, 0.995],
        "head": [0.8, 0.96],
        "gate": [0.7, 0.8],
        "scalar": [0.8, 0.95],
    }
    assert {group["eps"] for group in optimizers[1].param_groups} == {1e-9}


def test_rates_scale_with_batch_and_width_and_say_so():
    rates = {"matrix_lr": 0.012, "embedding_lr": 0.18, "unit_head_lr": 0.1, "free_head_lr": 0.02}
    config = OptimizerConfig(**rates, lr_reference_batch_tokens=2**19, lr_reference_width=64)
    scaled, lines = scale_rates(config, 2**20, 16)
    root_two = 2**0.5
    assert scaled.matrix_lr == pytest.approx(0.012 * root_two)
    assert scaled.gate_lr == pytest.approx(1e-3 * root_two)
    assert scaled.scalar_lr == pytest.approx(5e-3 * root_two)
    assert scaled.embedding_lr == pytest.approx(0.18 * root_two * 2)
    assert scaled.unit_head_lr == pytest.approx(0.1 * root_two * 2)
    assert scaled.free_head_lr == pytest.approx(0.02 * root_two * 2)
    assert len(lines) == 2 and "1.414" in lines[0] and "1,048,576" in lines[0] and "x 2:" in lines[1]
    assert scale_rates(scaled, None, 16) == (scaled, [])  # it is done once
    built = describe_groups(build_optimizers(Decoder(TINY, seed=0), config, tokens_per_step=2**20))
    assert built == describe_groups(build_optimizers(Decoder(TINY, seed=0), scaled))


def test_rates_stay_where_no_scaling_is_asked_for():
    assert scale_rates(OptimizerConfig(), 12345, 99) == (OptimizerConfig(), [])


def test_scaling_needs_what_it_scales_with():
    with pytest.raises(UserError, match="tokens_per_step"):
        build_optimizers(Decoder(TINY, seed=0), OptimizerConfig(lr_reference_batch_tokens=512))
    with pytest.raises(UserError, match="embedding"):
        build_optimizers(nn.Linear(2, 2), OptimizerConfig(lr_reference_width=64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate_lr": -1e-3}, "optimizer gate_lr is -0.001"),
        ({"matrix_momentum": 1.0}, "matrix_momentum is 1.0"),
        ({"head_betas": (0.9, 1.0)}, "head_betas"),
        ({"head_betas": (0.9,)}, "head_betas has 1 values; give 2"),
        ({"lr_reference_width": 0}, "lr_reference_width is 0"),
        ({"eps": float("nan")}, "eps is nan"),
    ],
)
def test_bad_rates_name_the_field(changes, message):
    with pytest.raises(UserError, match=message):
        OptimizerConfig(**changes)


def test_experts_are_orthogonalised_one_by_one():
    generator = torch.Generator().manual_seed(4)
    stack = nn.Parameter(torch.randn(3, 12, 8, generator=generator))
    singles = [nn.Parameter(expert.clone()) for expert in stack.detach()]
    grads = torch.randn(3, 12, 8, generator=generator) * torch.tensor([1.0, 1e3, 0.0]).view(3, 1, 1)
    options = {"lr": 0.1, "weight_decay": 0.2}
    together, apart = Muon([stack], **options), Muon(singles, **options)
    for _ in range(2):
        stack.grad = grads.clone()
        for single, grad in zip(singles, grads, strict=True):
            single.grad = grad.clone()
        together.step()
        apart.step()
    for expert, single in zip(stack.detach(), singles, strict=True):
        torch.testing.assert_close(expert, single.detach(), atol=1e-6, rtol=1e-6)
    assert stack.isfinite().all()


@pytest.mark.parametrize("shape", [(3,), (2, 2, 2, 2)])
def test_muon_refuses_what_is_no_matrix(shape):
    with pytest.raises(UserError, match=r"Muon got a parameter of shape \["):
        Muon([nn.Parameter(torch.zeros(shape))])
    with pytest.raises(ValueError, match="Learning rate"):  # the parent's own checks
        Muon([nn.Parameter(torch.zeros(2, 2))], lr=-1.0)


def test_muon_keeps_its_state_through_a_state_dict():
    a, grads = _matrices()
    b = [nn.Parameter(parameter.detach().clone()) for parameter in a]
    first, second = Muon(a, lr=0.1), Muon(b, lr=0.5)
    _step(first, a, grads)
    for old, new in zip(a, b, strict=True):
        new.data.copy_(old.data)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    _step(first, a, grads)
    _step(second, b, grads)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _step(optimizer, parameters, grads):
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    optimizer.step()


def test_sharded_matrices_are_orthogonalised_whole(monkeypatch):
    """In one process: what is orthogonalised is whole, what is kept is sharded, and the result is the same."""
    from torch import distributed
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    seen = []

    def noting(stack, *arguments):
        seen.append(type(stack))
        return orthogonalize(stack, *arguments)

    monkeypatch.setattr(muon, "orthogonalize", noting)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        plain, grads = _matrices()
        sharded = [nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [Shard(0)])) for p in plain]
        optimizers = (Muon(plain, lr=0.1, weight_decay=0.1), Muon(sharded, lr=0.1, weight_decay=0.1))
        for _ in range(2):
            _step(optimizers[0], plain, grads)
            _step(optimizers[1], sharded, [distribute_tensor(grad, mesh, [Shard(0)]) for grad in grads])
        for a, b in zip(plain, sharded, strict=True):
            assert torch.equal(a, b.full_tensor())
            assert optimizers[1].state[b]["momentum_buffer"].placements == b.placements
        assert set(seen) == {torch.Tensor}
    finally:
        distributed.destroy_process_group()


def _matrices():
    generator = torch.Generator().manual_seed(3)
    shapes = [(12, 8), (12, 8), (8, 12), (8, 8)]
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    grads = [torch.randn(shape, generator=generator) for shape in shapes]
    return parameters, grads


@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
def test_muon_follows_torch_muon_up_to_its_bfloat16(adjust):
    ours, grads = _matrices()
    theirs, _ = _matrices()
    options = {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.9, "adjust_lr_fn": adjust}
    optimizers = (Muon(ours, **options), torch.optim.Muon(theirs, **options))
    for parameters, optimizer in zip((ours, theirs), optimizers, strict=True):
        for factor in (1.0, -0.5, 0.3):
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad * factor
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        # The reference iterates in bfloat16 (8 bits): a few percent of an update of size 0.1.
        torch.testing.assert_close(a, b, atol=0.02, rtol=0)


def test_matrices_of_one_shape_are_orthogonalised_each_by_itself():
    generator = torch.Generator().manual_seed(0)
    stack = torch.randn(3, 6, 10, generator=generator) * torch.tensor([1.0, 1e3, 1e-3]).view(3, 1, 1)
    together = orthogonalize(stack, (3.4445, -4.775, 2.0315), 5, 1e-7)
    for index in range(3):
        alone = orthogonalize(stack[index : index + 1], (3.4445, -4.775, 2.0315), 5, 1e-7)[0]
        torch.testing.assert_close(together[index], alone, atol=1e-5, rtol=1e-5)
        singular = torch.linalg.svdvals(alone)
        assert singular.min() > 0.3 and singular.max() < 1.5


@pytest.mark.parametrize("scale", [0.0, 1e-12], ids=["zero", "tiny"])
def test_vanishing_gradients_leave_muon_finite(scale):
    parameters, grads = _matrices()
    optimizer = Muon(parameters, lr=0.1)
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad * scale
    optimizer.step()
    assert all(p.isfinite().all() for p in parameters)


def test_parameter_without_gradient_stays():
    parameters, grads = _matrices()
    before = parameters[1].detach().clone()
    parameters[0].grad = grads[0]
    Muon(parameters, lr=0.1).step()
    assert torch.equal(parameters[1], before)


def test_constrain_after_step_keeps_rows_where_they_belong():
    model = Decoder(TINY, seed=0)
    optimizers = build_optimizers(model, OptimizerConfig())
    constrain_after_step(model, *optimizers)
    tokens = torch.randint(32, (2, 9))
    for _ in range(2):
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert model.embedding.weight.mean(dim=-1).abs().max() < 1e-6
    torch.testing.assert_close(model.readout.weight.square().mean(dim=-1), torch.ones(32))


@pytest.mark.parametrize(("residual", "expected"), [("norm_agnostic", 0.04), ("pre_norm", 0.01), ("ngpt", 0.01)])
def test_a_matrix_rate_of_none_is_that_of_the_rule(residual, expected):
    model = Decoder(ModelConfig(residual=residual, d_model=16, n_layers=1, n_heads=2, vocab_size=32), seed=0)

    def matrix_lr(**changes):
        optimizers = build_optimizers(model, OptimizerConfig(**changes), tokens_per_step=200)
        return next(row["lr"] for row in describe_groups(optimizers) if row["role"] == "matrix")

    assert matrix_lr() == expected
    assert matrix_lr(matrix_lr=0.3) == 0.3
    assert matrix_lr(lr_reference_batch_tokens=50) == pytest.approx(2 * expected)
