import pytest
import torch

from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder


@pytest.fixture
def build_model():
    """Builds a small decoder whose branches are not zero, so that every update does something."""

    def build(residual: str = "norm_agnostic", n_layers: int = 2, **changes) -> Decoder:
        shape = {"d_model": 16, "n_heads": 2, "vocab_size": 32, "max_seq_len": 16, "n_directions": 4} | changes
        model = Decoder(ModelConfig(residual=residual, n_layers=n_layers, **shape), seed=0)
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if name.endswith("out_proj.weight"):
                torch.nn.init.normal_(parameter, std=0.5, generator=generator)
        return model

    return build


@pytest.fixture
def fix_modulation():
    """Sets the modulation of every update to 1/2, or to 1 to the last bit of float32."""

    def fix(model: torch.nn.Module, modulation: float) -> None:
        for update in model.stream.updates:
            torch.nn.init.zeros_(update.modulator.weight)
            torch.nn.init.constant_(update.modulator.bias, {0.5: 0.0, 1.0: 40.0}[modulation])

    return fix


@pytest.fixture
def tokens(generator) -> torch.Tensor:
    return torch.randint(32, (3, 6), generator=generator)
