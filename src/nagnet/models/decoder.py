"""One decoder for every arm: the residual rule and the readout are objects it is given."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nagnet.errors import UserError
from nagnet.models.config import ModelConfig
from nagnet.models.initialization import EMBEDDING_STD, READOUT_STD, TIED_STD, initialize_, initialize_rows_
from nagnet.nn.attention import Attention, LayerPast, Past
from nagnet.nn.mlp import MLPS
from nagnet.nn.precision import Float32Embedding, product_dtype
from nagnet.nn.readout import Readout
from nagnet.nn.residual import RESIDUAL_STREAMS, NormAgnosticStream, ResidualStream, ResidualUpdate
from nagnet.nn.rotary import RotaryTable
from nagnet.nn.skip import Decision, Skipping, SkipsInForce, run_tokens
from nagnet.ops.loss import IGNORED_TARGET
from nagnet.typing import Float, Int

GRAPHS_PER_WIDTH = 8  # torch's own limit for one compiled function


class Block(nn.Module):
    """Attention and MLP between their residual updates.

    Nothing in ``forward`` depends on a number of this layer: one compiled block serves all.
    """

    def __init__(self, config: ModelConfig, layer_index: int):
        super().__init__()
        windows = config.sliding_windows
        self.attention = Attention(
            config.d_model,
            config.n_heads,
            config.n_kv_heads,
            config.head_dim,
            config.qk_gain,
            window=windows[layer_index % len(windows)] if windows else None,
            channel_scales=config.channel_scales,
        )
        self.mlp = MLPS[config.mlp](config.d_model, config.mlp_widths[layer_index], config.channel_scales)

    def forward(
        self,
        state: Any,
        reading: Tensor,
        gain: Tensor | None,
        attention_update: ResidualUpdate,
        mlp_update: ResidualUpdate,
        following: ResidualUpdate | None,
        cos: Tensor,
        sin: Tensor,
        key_mask: Tensor | None = None,
        past: LayerPast | None = None,
        skips: SkipsInForce | None = None,
    ) -> tuple[Any, Tensor | None, Tensor | None, list[Decision]]:
        """Takes state, reading [B, T, d] and gain [B, T] of the attention update.

        Returns:
            Those of ``following``, and what the tokens did in attention and MLP; without ``skips`` nothing was decided.
        """
        decisions = []
        decision = None
        if skips is not None:
            decisions.append(decision := skips.decide(attention_update.rotation_score(gain), 0))
        branch = self.attention(reading, cos, sin, key_mask, past, decision)
        state, mlp_reading, mlp_gain = attention_update.advance(state, branch, gain, mlp_update)
        if skips is not None:
            decisions.append(decision := skips.decide(mlp_update.rotation_score(mlp_gain), 1))
        assert mlp_reading is not None
        branch = run_tokens(self.mlp, mlp_reading, decision)
        return *mlp_update.advance(state, branch, mlp_gain, following), decisions

    def compile_packed(self) -> None:
        """Compiles what packed tokens run through, for any number of them; packing itself stays between the graphs."""
        self.mlp.compile(dynamic=True, fullgraph=True)
        self.attention.queries_of_rows = torch.compile(self.attention.queries_of_rows, dynamic=True, fullgraph=True)


class Decoder(nn.Module):
    """A decoder-only transformer.

    After every optimizer step call `constrain_` (`nagnet.constrain_after_step` does it for you); during the
    injection warm-up call `set_injection` before every step.

    Args:
        config: shape, residual rule and readout.
        seed: of the initial parameters; None draws it from torch's global generator.

    Attributes:
        checkpoint_blocks: whether training keeps the input of each block alone and runs the block again in the
            backward pass.
    """

    checkpoint_blocks = False

    def __init__(self, config: ModelConfig, seed: int | None = None):
        super().__init__()
        self.config = config
        self.embedding = Float32Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.n_layers))
        self.stream = build_stream(config)
        shared = self.embedding.weight if config.tie_embeddings else None
        self.readout = Readout(config.d_model, config.vocab_size, config.readout, weight=shared)
        self.rotary = RotaryTable(config.head_dim, config.rope_base, config.max_seq_len)
        self.skipping = Skipping(2 * config.n_layers, config.skip) if config.skip.on else None
        if not self.embedding.weight.is_meta:
            self.initialize_(int(torch.randint(2**31, ())) if seed is None else seed)
            self.constrain_()

    def initialize_(self, seed: int) -> None:
        """Draws all parameters anew, before any constraint: equal to the bit in every arm that has them."""
        initialize_(self, seed, self.config.projection_init)
        tied = self.config.tie_embeddings
        initialize_rows_(self.embedding.weight, TIED_STD if tied else EMBEDDING_STD, seed, "embedding.weight")
        if not tied:
            initialize_rows_(self.readout.weight, READOUT_STD, seed, "readout.weight")

    def trunk(
        self,
        tokens: Int[Tensor, "b t"],
        key_mask: Tensor | None = None,
        past: Past | None = None,
    ) -> Any:
        """Runs all blocks.

        Args:
            tokens: [B, T] integers below vocab_size. key_mask: bool [B, T], False hides a position from all others.
            past: earlier tokens of the same sequences, which the layers see and to which they add these
                (`nagnet.generation.cache`). It has a mask of its own: no ``key_mask`` beside it.

        Returns:
            The state of the residual stream after the last update; ``.split()`` gives direction and log norm.

        Raises:
            UserError: for tokens that `embed` does not take.
        """
        embedding = self.embed(tokens)
        if past is None:
            cos, sin = self.rotary(tokens.shape[1])
        else:
            self.rotary.reserve(past.end)
            cos, sin = self.rotary.at(past.positions)
        updates = list(self.stream.updates)
        state, reading, gain = self.stream.enter(embedding)
        decisions: list[Decision] = []
        execution = None if self.skipping is None else self.skipping.execution_now()
        checkpointing = self.checkpoint_blocks and self.training and torch.is_grad_enabled()
        for index, block in enumerate(self.blocks):
            following = updates[2 * index + 2] if index + 1 < len(self.blocks) else None
            run = functools.partial(checkpoint, block, use_reentrant=False) if checkpointing else block
            skips = None
            if self.skipping is not None:
                skips = self.skipping.in_force(index, tokens.shape)._replace(execution=execution)
            state, reading, gain, decided = run(
                state,
                reading,
                gain,
                updates[2 * index],
                updates[2 * index + 1],
                following,
                cos,
                sin,
                key_mask,
                None if past is None else past.layers[index],
                skips,
            )
            decisions += decided
        if self.skipping is not None:
            self.skipping.observe(decisions, key_mask if past is None else past.is_token, with_scores=past is None)
        return state

    def embed(self, tokens: Int[Tensor, "b t"]) -> Float[Tensor, "b t d"]:
        """Rows [B, T, d] of the table, in the stream's type.

        Raises:
            UserError: for a token outside the vocabulary (checked on CPU; an accelerator raises its own error).
        """
        if not torch.compiler.is_compiling():
            self.check_tokens(tokens)
        return self.embedding(tokens).to(self.stream_dtype())

    def check_tokens(self, tokens: Int[Tensor, "b t"]) -> None:
        """Raises the errors of `embed`."""
        if tokens.dim() != 2:
            raise UserError(f"tokens have shape {tuple(tokens.shape)}; give [batch, time]")
        if tokens.device.type == "cpu" and tokens.numel():
            low, high = (int(tokens),) * 2 if tokens.numel() == 1 else map(int, tokens.aminmax())
            if low < 0 or high >= self.config.vocab_size:
                wrong = low if low < 0 else high
                raise UserError(f"token id {wrong} is outside the vocabulary 0..{self.config.vocab_size - 1}")

    def stream_dtype(self) -> torch.dtype:
        """Type of the stream's vectors: that of the products, autocast included; the norm lane is float32 anyway."""
        first: Any = self.blocks[0]
        return product_dtype(first.attention.q_proj.weight)

    def forward(
        self, tokens: Int[Tensor, "b t"], key_mask: Tensor | None = None, past: Past | None = None
    ) -> Float[Tensor, "b t v"]:
        """Logits [B, T, V] in float32 for tokens [B, T]; arguments as `trunk`."""
        return self.readout(*self.trunk(tokens, key_mask, past).split())

    def summed_loss(
        self, tokens: Int[Tensor, "b t"], targets: Int[Tensor, "b t"]
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "b t"]]:
        """Sum of the cross entropy in nats, and each target's [B, T] without gradient; targets of -100 give 0.

        The logits of a chunk of tokens exist at a time, never [B, T, V].
        """
        _check_same_shape(tokens, targets)
        direction, log_norm = self.trunk(tokens).split()
        return self.readout.summed_loss(direction, log_norm, targets)

    def loss(self, tokens: Int[Tensor, "b t"], targets: Int[Tensor, "b t"]) -> Float[Tensor, ""]:
        """Mean cross entropy in nats over the targets that are not -100; 0 where there are none."""
        return self.summed_loss(tokens, targets)[0] / (targets != IGNORED_TARGET).sum().clamp(min=1)

    @torch.no_grad()
    def score(self, tokens: Int[Tensor, "b t"], targets: Int[Tensor, "b t"]) -> tuple[Float[Tensor, "b t"], Tensor]:
        """Loss of each target in nats and whether it is the likeliest token, both [B, T]; 0 and false for -100."""
        _check_same_shape(tokens, targets)
        with nullcontext() if self.skipping is None else self.skipping.counting(targets != IGNORED_TARGET):
            direction, log_norm = self.trunk(tokens).split()
        return self.readout.score(direction, log_norm, targets)

    def set_skip_threshold(self, threshold: float | None) -> None:
        """Lets tokens skip the sublayers in which their rotation score is not above ``threshold``.

        A model trained without skipping takes it too: a token that skips then leaves the stream as it is. Nothing is
        trained, and the threshold is saved only with a model that has a `SkipPolicy`.

        Args:
            threshold: p_thres in [0, 1]; 0 skips nothing that turns the stream, 1 everything. None: all run.

        Raises:
            UserError: for a threshold outside [0, 1], or a rule without a gain.
        """
        if self.skipping is None:
            if threshold is None:
                return
            self.stream.updates[0].rotation_score(torch.zeros(1, device=self.embedding.weight.device))
            self.skipping = Skipping(2 * self.config.n_layers).to(self.embedding.weight.device)
        self.skipping.set_threshold(threshold)

    def set_injection(self, scale: float) -> None:
        """Multiplies every gain by ``scale`` in [0, 1]; without effect for a rule that has no gain."""
        self.stream.set_injection(scale)

    def constrain_(self) -> None:
        """Brings parameters back to where rule and readout want them, after an optimizer step."""
        sublayers = (sublayer for block in self.blocks for sublayer in block.children())
        self.stream.constrain_(self.embedding.weight, sublayers)
        self.readout.constrain_()

    def compile_blocks(self, dynamic: bool = False) -> None:
        """Compiles the block once for all layers, in place; parameter names stay as they are.

        Each shape of tokens is compiled anew, and torch stops after a few: keep to the shapes of training, and run
        others under ``torch.compiler.set_stance("force_eager")``, as evaluation and diagnostics here do. Blocks of
        different MLP widths are compiled one by one, as are those of several models in one process: each model raises
        torch's limit, which is one for all of them, by what it needs.

        Args:
            dynamic: whether one graph serves all numbers of sequences and tokens from 2 on, as evaluation needs it.
        """
        torch._dynamo.config.recompile_limit += GRAPHS_PER_WIDTH * len(set(self.config.mlp_widths))
        skips = self.config.skip.on
        for block in self.blocks:
            assert isinstance(block, Block)
            block.compile(dynamic=dynamic, fullgraph=not skips)
            if skips:
                block.compile_packed()


def _check_same_shape(tokens: Tensor, targets: Tensor) -> None:
    if tokens.shape != targets.shape:
        raise UserError(
            f"tokens have shape {tuple(tokens.shape)} but targets {tuple(targets.shape)}; give one per token"
        )


def build_stream(config: ModelConfig) -> ResidualStream:
    """Builds the residual stream that ``config`` names."""
    stream_class = RESIDUAL_STREAMS[config.residual]
    options = {name: getattr(config, name) for name in stream_class.option_names}
    if issubclass(stream_class, NormAgnosticStream):
        used = config.readout.scale == "log_norm"
        options["encode_gain"] = config.init_encode_gain if used else None
    return stream_class(config.d_model, 2 * config.n_layers, **options)
