import pytest
import torch

from nagnet.diagnostics.probe import measuring, observe_gains, observe_updates
from nagnet.errors import UserError
from nagnet.nn.residual import RESIDUAL_STREAMS

RULES = list(RESIDUAL_STREAMS)


@pytest.mark.parametrize("residual", RULES)
def test_observer_sees_every_update_as_it_ran(build_model, tokens, residual):
    model = build_model(residual, n_layers=3)
    steps = []
    with observe_updates(model, steps.append):
        state = model.trunk(tokens)
    assert [step.index for step in steps] == [1, 2, 3, 4, 5, 6]
    for step in steps:
        again = step.update.write(step.before, step.branch, step.gain)
        torch.testing.assert_close(again.merge(), step.after.merge())
        assert (step.gain is None) == (residual != "norm_agnostic")
        assert step.before.split()[1].shape == (3, 6)
    for before, after in zip(steps[:-1], steps[1:], strict=True):
        assert before.after is after.before
    assert steps[-1].after is state
    block = model.blocks[0]
    branch = block.mlp(steps[1].reading)
    torch.testing.assert_close(branch, steps[1].branch)


def test_everything_is_as_it_was_afterwards(build_model, tokens):
    model = build_model()
    model.train()
    model.blocks[1].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    logits = model(tokens)
    for observe in (observe_updates, observe_gains):
        with pytest.raises(ZeroDivisionError), observe(model, lambda *_: 1 / 0):
            assert not model.training and not torch.is_grad_enabled()
            model(tokens)
        assert {name: module.training for name, module in model.named_modules()} == modes
        assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
        assert torch.is_grad_enabled()
    torch.testing.assert_close(model(tokens), logits, rtol=0, atol=0)


def test_a_method_set_on_the_instance_is_put_back(build_model, tokens):
    model = build_model()
    update = model.stream.updates[0]
    calls = []
    fused = update.advance

    def counted(*arguments):
        calls.append(1)
        return fused(*arguments)

    update.advance = counted
    with observe_updates(model, lambda step: None):
        model.trunk(tokens)
    assert update.advance is counted and len(calls) == 1
    with observe_gains(model, lambda *_: None):
        model.trunk(tokens)
    assert update.advance is counted and len(calls) == 1, "gains are measured on the definition of advance"


def test_observers_may_be_nested(build_model, tokens):
    model = build_model()
    inner, outer = [], []
    with observe_updates(model, outer.append), observe_updates(model, inner.append):
        model.trunk(tokens)
    model.trunk(tokens)
    assert len(inner) == len(outer) == 4


def test_models_without_a_stream_or_gains(build_model, tokens):
    with pytest.raises(UserError, match="Linear"), observe_updates(torch.nn.Linear(2, 2), print):
        pass
    with pytest.raises(UserError, match="no norm-agnostic"), observe_gains(build_model("pre_norm"), print):
        pass


# Dynamo looks at .grad of tensors that are no leaves and mutes the warning by a logger, not by a filter.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("residual", ["pre_norm", "norm_agnostic"])
def test_a_compiled_model_is_watched_uncompiled(build_model, tokens, residual):
    """Any compiler would do: this one proves that compiled code is left out while the probe is in place."""
    model = build_model(residual)
    entered = []

    def backend(graph, inputs):
        entered.append(1)
        return graph

    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True, dynamic=False)
    before = model(tokens)
    compiled, steps = len(entered), []
    assert compiled > 0
    with observe_updates(model, steps.append):
        model.trunk(tokens)
    assert len(steps) == 4
    torch.testing.assert_close(model(tokens), before)
    assert len(entered) == compiled, "the probe caused a recompilation"


def test_measuring_restores_after_an_error(build_model):
    model = build_model().train()
    with pytest.raises(RuntimeError), measuring(model):
        raise RuntimeError
    assert all(module.training for module in model.modules())
