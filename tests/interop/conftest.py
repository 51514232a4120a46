"""Models and a tokenizer to exchange."""

import pytest
import torch

from nagnet.data.tokenizer import train_tokenizer
from nagnet.models.checkpoint import save_model
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder

VOCAB = 300
SHAPE = {"d_model": 32, "n_layers": 3, "n_heads": 4, "vocab_size": VOCAB, "max_seq_len": 64, "n_directions": 3}


@pytest.fixture(scope="session")
def tokenizer():
    text = "def main(argument):\n    return the_value + other_value * 12 or {'name': 'value'}\n" * 3
    return train_tokenizer([text, "the other values of the name, in return"], VOCAB)


@pytest.fixture(scope="session")
def decoder():
    """Makes a model in which every parameter has an effect, no two alike."""

    def make(**options) -> Decoder:
        model = Decoder(ModelConfig(**SHAPE | options), seed=0)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        model.constrain_()
        return model.eval()

    return make


@pytest.fixture(scope="session")
def saved(decoder, tokenizer, tmp_path_factory):
    """Writes a model folder with a tokenizer; returns model and folder."""

    def save(name, **options):
        folder = tmp_path_factory.mktemp("saved") / name
        model = decoder(**options)
        save_model(model, folder)
        tokenizer.save(folder / "tokenizer.json")
        return model, folder

    return save
