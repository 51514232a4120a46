import pytest
import torch

from nagnet.cli.device import resolve_device
from nagnet.errors import UserError


@pytest.fixture
def machine(monkeypatch):
    def set_devices(cuda: bool, mps: bool) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return set_devices


@pytest.mark.parametrize(
    ("cuda", "mps", "device"), [(True, False, "cuda"), (False, True, "mps"), (False, False, "cpu")]
)
def test_auto_takes_the_best_device_there_is(machine, cuda, mps, device):
    machine(cuda, mps)
    assert resolve_device("auto") == torch.device(device)


def test_a_named_device_is_obeyed(machine):
    machine(cuda=True, mps=False)
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("cuda") == torch.device("cuda")


def test_a_device_that_is_not_there(machine):
    machine(cuda=False, mps=False)
    with pytest.raises(UserError, match="^--device cuda: this machine has cpu only$"):
        resolve_device("cuda")
