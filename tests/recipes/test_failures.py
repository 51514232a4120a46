"""The walkthrough's failures fail here too, are seen, and their cure is left alone."""

import pytest
import torch

from nagnet.diagnostics.health import stream_health
from nagnet.recipes import RECIPES
from nagnet.training.distributed import World
from nagnet.training.health import HealthMonitor, health_tokens
from nagnet.training.loop import NonFiniteLoss, Trainer
from nagnet.training.text import open_text

STEPS = 100  # about half of each run; the gates shut in its first quarter


def _alarms(name):
    """Alarms that stand after ``STEPS`` steps of a recipe, measured at its own intervals."""
    config = RECIPES[name]().replace(compile=False)
    text = open_text(None, config.model.vocab_size, config.eval_bytes)
    trainer = Trainer(name, config, config.model, text.loader(config, World()), torch.device("cpu"))
    monitor, alarms = HealthMonitor(), []
    for step in range(1, STEPS + 1):
        trainer.step()
        if step % config.health_interval == 0:
            _, alarms = monitor.check(stream_health(trainer.model, health_tokens(trainer.batch(step - 1)[0])))
    return alarms


@pytest.mark.slow
def test_the_alarm_sees_the_collapse():
    assert len(_alarms("walkthrough-collapse")) >= 3


@pytest.mark.slow
def test_the_alarm_leaves_the_cure_alone():
    assert not _alarms("walkthrough-cure")


@pytest.mark.slow
def test_gates_without_a_clamp_stop_the_run():
    with pytest.raises(NonFiniteLoss, match="gradient norm is nan"):
        _alarms("walkthrough-nan")
