"""Small random decoders in float64: what is cached must equal what is not, to rounding."""

import pytest
import torch

from nagnet.generation import graph
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder

VOCAB_SIZE = 32


@pytest.fixture
def build(generator):
    """Builds a decoder every parameter of which is random, in float64; keywords change its config."""

    def make(dtype=torch.float64, **changes) -> Decoder:
        shape = {"d_model": 16, "n_layers": 3, "n_heads": 4, "vocab_size": VOCAB_SIZE, "n_directions": 3}
        model = Decoder(ModelConfig(**(shape | {"max_seq_len": 16} | changes)), seed=0).to(dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise / max(parameter.shape[-1], 4) ** 0.5 if parameter.dim() == 2 else 0.5 * noise)
                if name == "embedding.weight":
                    parameter.mul_(8.0)  # logits of order 1, also where exp(s) scales them
        model.constrain_()
        return model

    return make


@pytest.fixture
def tokens(generator):
    return torch.randint(VOCAB_SIZE, (2, 13), generator=generator)


@pytest.fixture
def compilations(monkeypatch):
    """Names of the functions of which graphs of the decoding step were compiled."""
    names = []
    compile_graph = graph.Graph.compile

    def compile_and_note(self, *arguments):
        names.append(self._function.__name__)
        return compile_graph(self, *arguments)

    monkeypatch.setattr(graph.Graph, "compile", compile_and_note)
    return names
