"""Small decoders that the tests of models share."""

import pytest
import torch

from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.nn.readout import ReadoutConfig
from nagnet.nn.residual import COMPONENTS, RESIDUAL_STREAMS

VARIANTS = {f"without-{name}": {"without": (name,)} for name in COMPONENTS} | {
    "without-all": {"without": tuple(COMPONENTS)},
    "one-direction": {"n_directions": 1},
    "tapered": {"mlp_taper": 0.5},
    "channel-scales": {"channel_scales": True},
    "per-entry": {"readout": ReadoutConfig("free", "per_entry")},
    "learned-log-norm": {"readout": ReadoutConfig("unit", "learned_log_norm")},
}


@pytest.fixture(params=RESIDUAL_STREAMS)
def residual(request):
    """The name of each residual rule."""
    return request.param


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS)
def variant(request):
    """Fields that change a norm-agnostic model: ablations and options."""
    return request.param


@pytest.fixture
def small():
    """Makes the config of a small model; keywords change it."""

    def make(residual="norm_agnostic", **changes) -> ModelConfig:
        shape = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 32, "max_seq_len": 16, "n_directions": 3}
        return ModelConfig(residual=residual, **(shape | changes))

    return make


@pytest.fixture
def randomised(generator):
    """Builds a decoder every parameter of which is random, so that no part of it is at rest."""

    def make(config: ModelConfig, dtype=torch.float32) -> Decoder:
        model = Decoder(config, seed=0).to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise / max(parameter.shape[-1], 4) ** 0.5 if parameter.dim() == 2 else 0.5 * noise)
        model.constrain_()
        return model

    return make


@pytest.fixture
def tokens(generator):
    return torch.randint(32, (2, 9), generator=generator)


@pytest.fixture
def targets(generator):
    return torch.randint(32, (2, 9), generator=generator)
