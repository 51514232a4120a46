"""One step of training: what it weighs, what it counts, when it stops."""

import dataclasses
import json
import os
import signal

import numpy as np
import pytest
import torch

from nagnet.data.loader import BatchLoader, PackedTokens
from nagnet.errors import UserError
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.models.flops import training_flops_per_token
from nagnet.nn.skip import SkipPolicy
from nagnet.training.config import RunConfig
from nagnet.training.distributed import World
from nagnet.training.loop import NonFiniteLoss, Trainer, backward, interrupt_flag
from nagnet.training.parallel import Parallel
from nagnet.training.schedule import ScheduleConfig

TINY = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=32, max_seq_len=16, n_directions=3)
CPU = torch.device("cpu")


def _trainer(residual="norm_agnostic", **changes):
    tokens = (np.arange(2000) * 7 % 31).astype(np.uint16)
    tokens[::100] = 31
    packed = PackedTokens(tokens, np.arange(0, 2001, 100), bos_id=31, vocab_size=32)
    run = RunConfig(model=TINY, flops=2e8, batch_size=4, seq_len=16, compile=False)
    run = dataclasses.replace(run, **changes)
    loader = BatchLoader(packed, run.batch_size, run.seq_len, run.seed)
    return Trainer(residual, run, TINY.replace(residual=residual), loader, CPU)


class _KnownLosses:
    """A model whose loss on a token is the token itself, as a float."""

    def __init__(self):
        self.factor = torch.ones((), requires_grad=True)

    def summed_loss(self, tokens, targets):
        losses = torch.where(targets == -100, 0.0, tokens.float()) * self.factor
        return losses.sum(), losses.detach()


def _two_micro_batches(first_targets, second_targets):
    """Losses 1.0 in the first row and 2.0 in the second, with the given numbers of targets."""
    tokens = torch.tensor([[1] * 100, [2] * 100])
    targets = torch.full((2, 100), -100)
    targets[0, :first_targets] = 0
    targets[1, :second_targets] = 0
    return tokens, targets


def test_accumulation_weighs_by_targets():
    model = _KnownLosses()
    loss = backward(Parallel(model, World()), *_two_micro_batches(10, 100), n_parts=2)
    assert loss == pytest.approx(210 / 110, abs=1e-6)
    assert model.factor.grad.item() == pytest.approx(210 / 110, abs=1e-6)


def test_micro_batch_without_targets_adds_nothing():
    model = _KnownLosses()
    assert backward(Parallel(model, World()), *_two_micro_batches(0, 100), n_parts=2) == pytest.approx(2.0)
    assert backward(Parallel(model, World()), *_two_micro_batches(0, 0), n_parts=2) == 0.0


def test_gradient_does_not_depend_on_micro_batches():
    model = Decoder(TINY, seed=0)
    tokens = torch.randint(32, (4, 13))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, 2:] = -100
    gradients = []
    for parts in (1, 4):
        model.zero_grad()
        backward(Parallel(model, World()), inputs, targets, parts)
        gradients.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("residual", ["norm_agnostic", "pre_norm", "post_norm", "none"])
def test_loss_falls(residual):
    trainer = _trainer(residual)
    losses = []
    while not trainer.finished:
        losses.append(trainer.step()["loss"])
    assert len(losses) == trainer.n_steps > 20
    assert np.mean(losses[-5:]) < losses[0] - 0.05


def test_step_reports_what_it_did():
    trainer = _trainer(schedule=ScheduleConfig(warmup=0.0, injection_warmup=1.0))
    row = trainer.step()
    assert row["step"] == 1
    assert row["tokens"] == 64
    assert row["flops"] == trainer.flops_per_step
    assert row["lr_scale"] == 1.0
    assert row["injection"] == pytest.approx(1 / trainer.n_steps)
    assert float(trainer.model.stream.updates[0].injection) == pytest.approx(1 / trainer.n_steps)
    json.dumps(row)


def test_same_seed_same_losses_and_other_seed_others():
    a, b, c = _trainer(), _trainer(), _trainer(seed=1)
    first = [a.step()["loss"] for _ in range(3)]
    assert first == [b.step()["loss"] for _ in range(3)]
    assert first != [c.step()["loss"] for _ in range(3)]


def test_non_finite_loss_stops_before_the_parameters_change():
    trainer = _trainer()
    with torch.no_grad():
        trainer.model.embedding.weight[:, 0] = torch.nan
    before = trainer.model.readout.weight.detach().clone()
    with pytest.raises(NonFiniteLoss, match="norm_agnostic.*nan.*step 0"):
        trainer.step()
    assert torch.equal(trainer.model.readout.weight, before)
    assert trainer.n_done == 0


def test_budget_is_spent_within_half_a_step():
    trainer = _trainer()
    assert abs(trainer.n_steps * trainer.flops_per_step - 2e8) <= trainer.flops_per_step / 2


def test_first_interrupt_is_a_flag_and_second_an_exception():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interrupt_flag() as received:
        os.kill(os.getpid(), signal.SIGINT)
        assert received == [signal.SIGINT]
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 0.1), (9, 1.0), (34, 1.0), (35, 1.0), (67, 0.05 + 0.95 * 33 / 65), (99, 0.05 + 0.95 / 65)],
)
def test_learning_rate_rises_holds_and_falls(step, expected):
    schedule = ScheduleConfig(warmup=0.1, warmdown=0.65, final_lr=0.05)
    assert schedule.lr_scale(step, 100) == pytest.approx(expected)


@pytest.mark.parametrize(("changes", "message"), [({"flops": 0.0}, "flops"), ({"micro_batches": 3}, "micro_batches 3")])
def test_bad_run_config_names_the_field(changes, message):
    with pytest.raises(UserError, match=message):
        _trainer(**changes)


def _skipping_trainer(**changes):
    policy = SkipPolicy(**({"target_rate": 0.25, "averaging": 0.5} | changes.pop("policy", {})))
    trainer = _trainer(**changes)
    model = TINY.replace(skip=policy)
    return Trainer("mod", trainer.config.replace(model=model), model, trainer.loader, CPU)


def test_skipping_buys_tokens():
    """A budget in FLOPs counts what was executed, so a run that skips sees more tokens, on the same schedule."""
    full, skipping = _trainer(flops=8e8), _skipping_trainer(flops=8e8)
    while not full.finished:
        full.step()
    rows = []
    while not skipping.finished:
        rows.append(skipping.step())
    assert skipping.flops == pytest.approx(full.flops, rel=0.01)
    rates = [row["skip_rate"] for row in rows]
    start = next(index for index, row in enumerate(rows) if row["injection"] == 1.0) + 1
    assert max(rates[:start]) == 0 and np.mean(rates[start + 5 :]) == pytest.approx(0.25, abs=0.04)
    assert skipping.tokens > 1.05 * full.tokens
    assert skipping.n_steps == skipping.n_done == len(rows)
    assert rows[-1]["lr_scale"] == pytest.approx(full.config.schedule.final_lr, abs=0.03)
    executed = sum(training_flops_per_token(skipping.model_config, 16, run_rates=row["run_rates"]) for row in rows)
    assert skipping.flops == executed * skipping.config.tokens_per_step


def test_a_budget_in_steps_stays_one():
    trainer = _skipping_trainer(flops=None, steps=12)
    while not trainer.finished:
        trainer.step()
    assert trainer.n_done == 12 and trainer.flops < 12 * trainer.flops_per_step


def test_fixed_threshold_and_start_step():
    trainer = _skipping_trainer(flops=None, steps=6, policy={"target_rate": None, "threshold": 0.45, "start_step": 3})
    rows = [trainer.step() for _ in range(6)]
    assert [row["skip_threshold"] for row in rows] == pytest.approx([-1, -1, -1, 0.45, 0.45, 0.45])


def test_evaluation_neither_moves_the_threshold_nor_counts():
    trainers = [_skipping_trainer(flops=None, steps=20) for _ in range(2)]
    for step in range(20):
        rows = []
        for trainer, evaluates in zip(trainers, (True, False), strict=True):
            if evaluates and step % 3 == 0:
                before = float(trainer.model.skipping.threshold)
                trainer.model.score(*trainer.batch(step + 7))
                assert float(trainer.model.skipping.threshold) == before
            rows.append(trainer.step())
        for key in ("loss", "skip_threshold", "run_rates", "flops"):
            assert rows[0][key] == rows[1][key]
