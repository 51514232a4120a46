"""Sampling without a cache: for short samples from small models."""

from __future__ import annotations

import torch

from nagnet.data.tokenizer import Tokenizer
from nagnet.errors import UserError
from nagnet.models.decoder import Decoder


@torch.no_grad()
def sample_text(
    model: Decoder, tokenizer: Tokenizer, prompt: str, n_tokens: int, temperature: float = 0.8, seed: int = 0
) -> str:
    """Continues a prompt.

    Args:
        prompt: text; a BOS token is put in front. n_tokens: tokens to add.
        temperature: divides the logits; 0 takes the most likely token. seed: of the draws.

    Returns:
        The prompt and its continuation. The beginning-of-sequence token is never drawn.

    Raises:
        UserError: for a negative temperature.
    """
    if temperature < 0:
        raise UserError(f"temperature is {temperature}; give 0 (most likely token) or more")
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    for _ in range(n_tokens):
        context = torch.tensor([ids[-model.config.max_seq_len :]], device=device)
        logits = model(context)[0, -1].double().cpu()
        logits[tokenizer.bos_id] = -torch.inf
        if temperature == 0:
            ids.append(int(logits.argmax()))
        else:
            probabilities = torch.softmax(logits / temperature, dim=-1)
            ids.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return tokenizer.decode(ids)
