"""The decoder as a model of the transformers library.

`nagnet export hf` puts this file and all that it imports from nagnet beside the weights, and transformers runs them
from there: it may import torch, transformers and nagnet's own mathematics, and nothing else.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.nn.attention import Past
from nagnet.nn.precision import Float32Module

# The name of the cache among the outputs has changed within transformers 5; of the inputs both are taken.
_CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"


class NagnetConfig(PretrainedConfig):
    """All fields of nagnet's `ModelConfig` under ``nagnet``; the names of transformers follow from them.

    Args:
        nagnet: what `ModelConfig.from_dict` takes. use_cache: whether a call returns a cache unless it says otherwise.
        options: of every config of transformers: ids of special tokens, dtype and so on.
    """

    model_type = "nagnet"
    keys_to_ignore_at_inference = ["cache", "past_key_values", "confidence"]

    def __init__(self, nagnet: dict[str, Any] | None = None, use_cache: bool = True, **options: Any):
        shape = ModelConfig.from_dict(nagnet or {})
        self.nagnet, self.use_cache = shape.to_dict(), use_cache
        derived = {
            "vocab_size": shape.vocab_size,
            "hidden_size": shape.d_model,
            "intermediate_size": shape.d_ff,
            "num_hidden_layers": shape.n_layers,
            "num_attention_heads": shape.n_heads,
            "num_key_value_heads": shape.n_kv_heads,
            "head_dim": shape.head_dim,
            "max_position_embeddings": shape.max_seq_len,
            "tie_word_embeddings": shape.tie_embeddings,
        }
        super().__init__(**options | derived)


@dataclass
class NagnetOutput(CausalLMOutputWithPast):
    """Loss and logits as of any causal model, and the confidence.

    Attributes:
        confidence: exp(s_N) [B, T], float32 or wider: for a norm-agnostic model the inverse temperature of the next
            token's distribution, for others the RMS of the stream at its end.
    """

    confidence: Tensor | None = None


class _CachedLayer:
    """What a layer is given of earlier tokens: a `LayerPast` whose keys and values a cache of transformers keeps."""

    written = False

    def __init__(self, cache: Any, layer_index: int, allowed: Tensor):
        self._cache, self._layer_index, self.allowed = cache, layer_index, allowed
        self._seen: tuple[Tensor, Tensor] | None = None

    def write(self, k: Tensor, v: Tensor) -> None:
        """Keeps keys and values [B, G, T, k] of this pass's tokens."""
        self._seen = self._cache.update(k, v, self._layer_index)

    def seen(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens so far, those just written included."""
        assert self._seen is not None
        return self._seen


class NagnetForCausalLM(PreTrainedModel, GenerationMixin):
    """A `Decoder` behind the interface of transformers: ``generate``, ``Trainer``, ``save_pretrained``.

    Whatever optimizer steps its parameters, rule and readout bring theirs back to where they belong after the step.
    """

    config_class = NagnetConfig
    main_input_name = "input_ids"
    _supports_sdpa = True
    _no_split_modules = ["Block"]
    _tied_weights_keys = {"decoder.readout.weight": "decoder.embedding.weight"}

    def __init__(self, config: NagnetConfig):
        super().__init__(config)
        self.decoder = Decoder(ModelConfig.from_dict(config.nagnet))
        self._keep_in_fp32_modules_strict = _float32_modules(self)
        self.post_init()
        _constrain_after_steps(self)

    def _init_weights(self, module: Any) -> None:
        # The decoder has drawn its parameters; loading leaves tables that no file holds empty.
        if hasattr(module, "reset_buffers"):
            module.reset_buffers()

    def get_input_embeddings(self) -> torch.nn.Module:
        """The token table."""
        return self.decoder.embedding

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **options: Any,
    ) -> Any:
        """Logits of every token's successor.

        Args:
            input_ids: int64 [B, T].
            attention_mask: [B, earlier tokens + T], 0 for padding, on either side. None: no padding.
            position_ids: [B, T], one after another in each row; they follow from the mask anyway.
            cache, past_key_values: of earlier tokens, by its new or its old name.
            labels: int64 [B, T], the tokens themselves; -100 is not scored. The loss is that of each token's successor.
            use_cache: return a cache; default: as the config says, but in training none.
            logits_to_keep: of this many last positions, or of those named; 0: all.

        Raises:
            ValueError: for a mask of another shape, positions that are not consecutive, or a cache of fixed length.
        """
        cache = past_key_values if cache is None else cache
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if cache is None and use_cache:
            cache = DynamicCache(config=self.config)
        _check(input_ids, attention_mask, position_ids, cache)
        mask = None if attention_mask is None else attention_mask.bool()
        if cache is not None:
            state = self.decoder.trunk(input_ids, past=self._past(input_ids, mask, cache))
        else:
            state = self.decoder.trunk(input_ids, None if mask is None or bool(mask.all()) else mask)
        direction, log_norm = state.split()
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.decoder.readout(direction[:, kept], log_norm[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **options)
        output = NagnetOutput(loss=loss, logits=logits, confidence=log_norm.exp(), **{_CACHE: cache})
        return output.to_tuple() if return_dict is False else output

    def _past(self, tokens: Tensor, mask: Tensor | None, cache: Any) -> Past:
        """Where the tokens stand, and what of the cache each of them sees; slots of padding count, but are not seen."""
        earlier, end = cache.get_seq_length(), cache.get_seq_length() + tokens.shape[1]
        if mask is None:
            mask = torch.ones(tokens.shape[0], end, dtype=torch.bool, device=tokens.device)
        slots = torch.arange(end, device=tokens.device)
        distance = slots[earlier:].unsqueeze(1) - slots
        # Padding sees itself: what it computes is dropped, but must be finite.
        seen = ((distance >= 0) & mask.unsqueeze(1)) | (distance == 0)
        windows = self.decoder.config.sliding_windows or (0,)
        by_window = {w: (seen & (distance < w) if w else seen).unsqueeze(1) for w in set(windows)}
        layers: list[Any] = [
            _CachedLayer(cache, layer, by_window[windows[layer % len(windows)]])
            for layer in range(self.decoder.config.n_layers)
        ]
        positions = (mask.long().cumsum(dim=-1) - 1).clamp(min=0)[:, earlier:]
        return Past(positions, end, layers, mask[:, earlier:])


def _check(tokens: Tensor, mask: Tensor | None, position_ids: Tensor | None, cache: Any) -> None:
    if getattr(cache, "is_compileable", False):  # it returns its whole length, used or not
        raise ValueError("caches of a fixed length are not supported; leave cache_implementation out")
    earlier = 0 if cache is None else cache.get_seq_length()
    expected = (tokens.shape[0], earlier + tokens.shape[1])
    if mask is not None and mask.shape != expected:
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}; give [batch, all tokens so far], here {list(expected)}"
        )
    if position_ids is None or position_ids.shape[-1] < 2:
        return
    consecutive = position_ids.diff(dim=-1) == 1
    if mask is not None:
        is_token = mask[:, earlier:].bool()
        consecutive = consecutive | ~(is_token[:, 1:] & is_token[:, :-1])
    if not bool(consecutive.all()):
        raise ValueError("position_ids jump within a row; several documents in one row are not supported")


def _float32_modules(model: torch.nn.Module) -> list[str]:
    """Outermost modules that stay float32 in a model loaded in 16 bits."""
    found: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, Float32Module) and not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    return found


def _constrain_after_steps(model: NagnetForCausalLM) -> None:
    """Calls ``constrain_`` after each step of any optimizer that has parameters of the model, while the model lives."""
    reference = weakref.ref(model)

    def after_step(optimizer: Optimizer, *_: Any) -> None:
        stepped = reference()
        if stepped is None:
            return
        own = {id(parameter) for parameter in stepped.parameters()}
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            stepped.decoder.constrain_()

    handle = register_optimizer_step_post_hook(after_step)
    weakref.finalize(model, handle.remove)
