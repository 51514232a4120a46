"""What every test shares: few threads and a fixed seed."""

import random

import pytest
import torch

# More threads than cores make small tensors slower, and the suite often shares its machine.
torch.set_num_threads(min(2, torch.get_num_threads()))


@pytest.fixture(autouse=True)
def _fixed_seeds():
    """A test draws the same numbers whichever tests ran before it."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def generator() -> torch.Generator:
    """A random generator of the test's own, on the CPU."""
    return torch.Generator().manual_seed(0)
