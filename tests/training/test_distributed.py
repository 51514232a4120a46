"""Two processes train as one does, wait for each other only so long, and end together.

This file is also the program of the two processes: `launch` runs it, and the functions ``check_...`` below run in
both of them.
"""

import json
import os
import re
import shutil
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nagnet.errors import UserError
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.nn.skip import SkipPolicy
from nagnet.ops.loss import IGNORED_TARGET
from nagnet.training.compute import autocast
from nagnet.training.config import RunConfig
from nagnet.training.distributed import (
    World,
    any_rank,
    is_sharded,
    join_world,
    on_main,
    sum_over_ranks,
    whole_tensor,
    world_of_environment,
)
from nagnet.training.loop import Trainer
from nagnet.training.optimizer import OptimizerConfig, build_optimizers, constrain_after_step
from nagnet.training.parallel import Parallel, parallelize
from nagnet.training.schedule import ScheduleConfig

# 33 rows do not divide by two: shards of unequal size.
SMALL = ModelConfig(d_model=32, n_layers=3, n_heads=2, vocab_size=33, max_seq_len=16, n_directions=3)
CONFIGS = {
    "norm_agnostic": SMALL,
    "tied": SMALL.replace(tie_embeddings=True),
    "pre_norm": SMALL.replace(residual="pre_norm"),
}
SKIPS = SMALL.replace(skip=SkipPolicy(target_rate=0.3, start_step=1))
CPU = torch.device("cpu")
STRATEGIES = ("ddp", "fsdp")
# Largest difference to one process, as a share of the tensor's largest entry, or of a hundredth of the largest of all:
# a scalar's gradient is a sum over tokens in which most cancels.
GRADIENT_BOUND = 1e-5
PARAMETER_BOUND = 2e-5  # after three steps: Newton-Schulz enlarges what sums of another order round
# FSDP splits the streams that enter a block, so their gradients are added in another order, in bfloat16.
BFLOAT16_BOUND = {"ddp": GRADIENT_BOUND, "fsdp": 6e-2}


def _model(config: ModelConfig = SMALL, seed: int = 0) -> Decoder:
    """A model without a zero in it: gradients of zero would agree whatever happens."""
    model = Decoder(config, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.constrain_()
    return model


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Four rows, of which the first and the last have few targets."""
    tokens, targets = torch.randint(33, (2, 4, 13), generator=torch.Generator().manual_seed(1))
    targets[0, 2:] = IGNORED_TARGET
    targets[3, :9] = IGNORED_TARGET
    return tokens, targets


def _backward(parallel: Parallel, dtype: torch.dtype = torch.float32) -> None:
    """Gradient of the mean over all targets; this process has two of the four rows, one at a time."""
    tokens, targets = _batch()
    rows = [2 * parallel.world.rank, 2 * parallel.world.rank + 1]
    n_targets = sum_over_ranks((targets[rows] != IGNORED_TARGET).sum())
    for row in rows:
        with parallel.micro_batch(last=row == rows[-1]), autocast(CPU, dtype):
            (parallel.summed_loss(tokens[row : row + 1], targets[row : row + 1])[0] / n_targets).backward()
    parallel.reduce_gradients()


def _backward_alone(model: Decoder, dtype: torch.dtype = torch.float32, before_row=lambda row: None) -> None:
    """The same gradient from one process; ``before_row`` may change the model before each row."""
    tokens, targets = _batch()
    n_targets = (targets != IGNORED_TARGET).sum()
    for row in range(4):
        before_row(row)
        with autocast(CPU, dtype):
            (model.summed_loss(tokens[row : row + 1], targets[row : row + 1])[0] / n_targets).backward()


def _gradients(model: Decoder) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else whole_tensor(p.grad).clone() for name, p in model.named_parameters()}


def _parameters(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: whole_tensor(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def _assert_close(actual: dict, expected: dict, bound: float) -> None:
    assert actual.keys() == expected.keys()
    floor = 0.01 * max(float(want.abs().max()) for want in expected.values() if want is not None)
    for name, want in expected.items():
        got = actual[name]
        if want is None:
            assert got is None or not got.any(), name
        else:
            worst, scale = float((got - want).abs().max()), max(floor, float(want.abs().max()))
            assert worst <= bound * scale, f"{name}: {worst:.2e} of {scale:.2e}"


def check_flags_sums_and_the_main_process(world):
    assert sum_over_ranks(torch.tensor([1.0, world.rank])).tolist() == [2.0, 1.0]
    assert [any_rank(world.rank == 1), any_rank(False)] == [True, False]
    assert on_main(world, lambda: os.getpid()) == sum_over_ranks(torch.tensor(os.getpid() * world.is_main))
    for error in (UserError("no such thing"), FileNotFoundError(2, "no such thing", "here")):

        def fail(error=error):
            raise error

        with pytest.raises(UserError, match="no such thing"):
            on_main(world, fail)


def check_all_start_from_the_parameters_of_the_main_process(world):
    expected = _parameters(_model(seed=0))
    for strategy in STRATEGIES:
        parallel = parallelize(_model(seed=world.rank), world, strategy)
        _assert_close(_parameters(parallel.model), expected, 0.0)


def check_gradients_are_those_of_one_process(world):
    for name, config in CONFIGS.items():
        reference = _model(config)
        _backward_alone(reference)
        for strategy in STRATEGIES:
            parallel = parallelize(_model(config), world, strategy)
            for checkpointing in (False, True):  # the second step also meets what the first left behind
                parallel.model.checkpoint_blocks = checkpointing
                parallel.model.zero_grad(set_to_none=True)
                _backward(parallel)
                _assert_close(_gradients(parallel.model), _gradients(reference), GRADIENT_BOUND)
            if name == "tied":
                assert parallel.model.readout.weight is parallel.model.embedding.weight


def check_three_steps_are_those_of_one_process(world):
    def train(model, backward):
        optimizers = build_optimizers(model, OptimizerConfig())
        constrain_after_step(model, *optimizers)
        for _ in range(3):
            backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    alone = _model()
    train(alone, lambda: _backward_alone(alone))
    for strategy in STRATEGIES:
        parallel = parallelize(_model(), world, strategy)
        train(parallel.model, lambda parallel=parallel: _backward(parallel))
        _assert_close(_parameters(parallel.model), _parameters(alone), PARAMETER_BOUND)


def check_bfloat16_leaves_norm_lane_and_gates_in_float32(world):
    bf16 = torch.bfloat16
    reference = _model()
    _backward_alone(reference, bf16)
    for strategy, block_dtype in (("ddp", torch.float32), ("fsdp", bf16)):
        parallel = parallelize(_model(), world, strategy, bf16)
        seen: dict[str, set[torch.dtype]] = {}

        def watch(update, seen=seen):
            advance = update.advance

            def watched(state, branch, gain, following):
                result = advance(state, branch, gain, following)
                fine = {name: p.dtype for name, p in update.named_parameters()}
                values = {"log_norm": state.log_norm, "gain": gain, "new log_norm": result[0].log_norm}
                for name, dtype in fine.items() | {(name, value.dtype) for name, value in values.items()}:
                    seen.setdefault(name, set()).add(dtype)
                return result

            update.advance = watched

        for update in parallel.model.stream.updates:
            watch(update)
        for block in parallel.model.blocks:
            block.mlp.up_proj.register_forward_hook(
                lambda layer, inputs, output, seen=seen: seen.setdefault("block", set()).update(
                    {("weight", layer.weight.dtype), ("output", output.dtype)}
                )
            )
        _backward(parallel, bf16)
        assert seen.pop("block") == {("weight", block_dtype), ("output", bf16)}
        assert {"alpha", "modulator.raw_beta", "log_norm", "gain", "new log_norm"} <= seen.keys()
        assert seen == dict.fromkeys(seen, {torch.float32})
        assert {p.dtype for p in parallel.model.parameters()} == {torch.float32}
        assert {p.grad.dtype for p in parallel.model.parameters()} == {torch.float32}
        _assert_close(_gradients(parallel.model), _gradients(reference), BFLOAT16_BOUND[strategy])
        for values in (parallel.model.score(*_batch())[0], parallel.model(_batch()[0])):  # an evaluation: no autocast
            assert values.dtype == torch.float32


def _skip_mlp(model: Decoder, skip: bool) -> None:
    """Makes the second block leave out its MLP for all tokens, or run it again."""

    def replaced(block: int, shape: torch.Size) -> torch.Tensor:
        runs = torch.ones(2, *shape)
        if block == 1 and skip:
            runs[1] = 0.0
        return runs

    assert model.skipping is not None
    model.set_skip_threshold(0.5)
    model.skipping.replaced = replaced


def check_a_sublayer_skipped_by_one_process_and_by_both(world):
    for strategy in STRATEGIES:
        parallel = parallelize(_model(SKIPS), world, strategy)
        for skipping in ({1}, {0, 1}, {0}, set()):
            alone = _model(SKIPS)
            _backward_alone(alone, before_row=lambda row: _skip_mlp(alone, row // 2 in skipping))  # noqa: B023
            parallel.model.zero_grad(set_to_none=True)
            _skip_mlp(parallel.model, world.rank in skipping)
            _backward(parallel)
            actual, expected = _gradients(parallel.model), _gradients(alone)
            assert None not in (*actual.values(), *expected.values())  # a matrix nobody used has a gradient of zeros
            _assert_close(actual, expected, GRADIENT_BOUND)
            assert bool(expected["blocks.1.mlp.up_proj.weight"].any()) == (skipping != {0, 1})


class _Rows:
    """Gives a process its rows of random tokens."""

    def __init__(self, world: World):
        self._world = world

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.randint(33, (4, 13), generator=torch.Generator().manual_seed(step)).chunk(self._world.size)
        return rows[self._world.rank][:, :-1], rows[self._world.rank][:, 1:]

    def epoch_of(self, step: int) -> int:
        return 0


def check_skipping_is_steered_by_all_processes(world):
    run = RunConfig(model=SKIPS, steps=4, batch_size=4, seq_len=12, compile=False, dtype="float32")
    run = run.replace(schedule=ScheduleConfig(injection_warmup=0.0))
    alone = Decoder(SKIPS, seed=run.seed)
    with torch.no_grad():
        alone(_Rows(World()).batch(0)[0])
    for strategy in STRATEGIES:
        trainer = Trainer("mod", run.replace(strategy=strategy), SKIPS, _Rows(world), CPU, world=world)
        rows = [trainer.step() for _ in range(4)]
        assert rows[0]["skip_threshold"] < 0 and rows[0]["skip_rate"] == 0
        assert rows[1]["skip_threshold"] == pytest.approx(alone.skipping.quantile(0.3), abs=1e-6)
        assert 0.1 < rows[1]["skip_rate"] < 0.5
        for row in rows:
            same = torch.tensor([row["skip_threshold"], row["skip_rate"]], dtype=torch.float64)
            assert torch.equal(sum_over_ranks(same.clone()), 2 * same)


def check_scores_trunk_logits_and_the_whole_model(world):
    tokens, targets = _batch()
    for config in CONFIGS.values():
        plain = _model(config)
        for strategy in STRATEGIES:
            parallel = parallelize(_model(config), world, strategy)
            for _ in range(2):
                with torch.no_grad():
                    assert torch.equal(parallel.model.score(tokens, targets)[0], plain.score(tokens, targets)[0])
                    assert torch.equal(parallel.model.trunk(tokens).merge(), plain.trunk(tokens).merge())
                    assert torch.equal(parallel.model(tokens), plain(tokens))
                _backward(parallel)
            whole = parallel.whole_model()
            assert (whole is not None) == world.is_main
            if whole is not None:
                assert not any(is_sharded(p) for p in whole.parameters())
                assert (whole.readout.weight is whole.embedding.weight) == config.tie_embeddings
                assert torch.equal(whole(tokens), plain(tokens))


def check_compiled_blocks(world):
    warnings.simplefilter("ignore")  # the compiler's own
    reference = _model()
    _backward_alone(reference)
    for strategy in STRATEGIES:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        parallel = parallelize(_model(), world, strategy)
        parallel.model.compile_blocks()
        for _ in range(2):
            parallel.model.zero_grad(set_to_none=True)
            _backward(parallel)
            _assert_close(_gradients(parallel.model), _gradients(reference), 10 * GRADIENT_BOUND)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # as an evaluation during the run
            torch.testing.assert_close(parallel.model.score(*_batch())[0], reference.score(*_batch())[0])
        counters = torch._dynamo.utils.counters
        assert counters["stats"]["unique_graphs"] == 2, counters  # a block between others, and the last one
        assert not counters["graph_break"], counters


def ending_when_a_process_stalls() -> None:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=60))
    store.set("here " + os.environ["RANK"], "")
    store.wait(["here 0", "here 1"])  # the short timeout must not meet a slow import
    with join_world("cpu", timeout_seconds=4.0) as (world, _):
        any_rank(False)
        try:
            any_rank(False) if world.is_main else store.wait(["seen"])
        finally:
            store.set("seen", "")


def ending_when_a_process_dies(world: World) -> None:
    parallel = parallelize(_model(), world)
    for step in range(3):
        if step and not world.is_main:
            os._exit(9)
        _backward(parallel)


CHECKS = {name: check for name, check in list(globals().items()) if name.startswith("check_")}
SLOW = ["check_compiled_blocks"]
QUICK = [name for name in CHECKS if name not in SLOW]


@pytest.fixture(scope="module")
def run_checks(launch, tmp_path_factory):
    """Runs checks in two processes, one of which dies then.

    Returns the names of those that passed in both, and the output of the two.
    """

    def run(*names: str, **options) -> tuple[list[str], list[str]]:
        record = tmp_path_factory.mktemp("checks") / "passed.json"
        results = launch(__file__, str(record), *names, **options)
        return json.loads(record.read_text()) if record.exists() else [], [output for _, output in results]

    return run


@pytest.fixture(scope="module")
def passed(run_checks):
    return run_checks(*QUICK)


@pytest.mark.parametrize("name", QUICK, ids=lambda name: name.removeprefix("check_"))
def test_two_processes(passed, name):
    names, outputs = passed
    assert name in names, "\n".join(outputs)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_blocks_in_two_processes(run_checks):
    names, outputs = run_checks(*SLOW, timeout=1800.0)
    assert names == SLOW, "\n".join(outputs)


def test_a_dead_process_ends_the_others_with_one_line(passed):
    _, (output, _) = passed
    assert re.search("UserError: .*died or stalled for 120 s, so process 0 of 2 stops too.*Connection", output), output


def test_a_stalled_process_ends_the_others_with_one_line(launch):
    (code, output), _ = launch(__file__)
    assert code == 1
    assert re.search("UserError: .*died or stalled for 4 s, so process 0 of 2 stops too.*Timed out", output), output


def test_one_process_has_no_group_and_the_plain_model():
    model = _model()
    with join_world("cpu") as (world, device):
        assert (world, device) == (World(0, 1, 0), CPU)
        assert not dist.is_initialized()
        parallel = parallelize(model, world, "fsdp", torch.bfloat16)
    assert parallel.summed_loss == model.summed_loss
    assert parallel.whole_model() is model
    assert any_rank(True) and on_main(world, lambda: 5) == 5


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "MASTER_ADDR.*torchrun"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "x", "RANK": "0"}, "LOCAL_RANK not"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "x"}, "RANK 2.*below WORLD_SIZE 2"),
        ({"RANK": "a", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "x"}, "RANK='a'.*whole numbers"),
    ],
)
def test_broken_environment_names_the_variable(environment, message):
    with pytest.raises(UserError, match=message):
        world_of_environment(environment)


def test_unknown_strategy_and_more_processes_than_gpus(monkeypatch):
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "MASTER_ADDR": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="process 4 of this machine has no GPU: there are 2"), join_world("cuda"):
        pass
    with pytest.raises(UserError, match="not on mps"), join_world("mps"):
        pass
    with pytest.raises(UserError, match="'zero'.*ddp or fsdp"):
        parallelize(_model(), World(), "zero")  # pyright: ignore[reportArgumentType]


def main(record: str, *names: str) -> None:
    passed = []
    timeout = 120.0 if not set(names) & set(SLOW) else 1200.0  # one process may compile while the other waits
    with join_world("cpu", timeout) as (world, _):
        for name in names:
            CHECKS[name](world)
            assert not any_rank(False)  # the others passed as well
            passed.append(name)
            if world.is_main:
                Path(record).write_text(json.dumps(passed))
        ending_when_a_process_dies(world)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:]) if sys.argv[1:] else ending_when_a_process_stalls()
