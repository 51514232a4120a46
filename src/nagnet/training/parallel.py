"""One model on several processes: replicated (DDP) or sharded (FSDP2), with the same gradients as on one."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nagnet.errors import UserError
from nagnet.models.decoder import Decoder
from nagnet.nn.attention import Attention
from nagnet.nn.precision import Float32Embedding, Float32Module
from nagnet.nn.readout import Readout
from nagnet.nn.rotary import RotaryTable
from nagnet.training.compute import autocast
from nagnet.training.distributed import World, sum_over_ranks, whole_tensor

Strategy = Literal["ddp", "fsdp"]


class Parallel:
    """A model and the processes that train it; this one is the case of a single process, and costs nothing.

    A step is, in every process, with as many parts everywhere:

        for part in parts:
            with parallel.micro_batch(last=part is parts[-1]):
                (parallel.summed_loss(*part)[0] / n_targets).backward()
        parallel.reduce_gradients()

    Gradients are summed over the processes, not averaged: with ``n_targets`` counted over all of them
    (`sum_over_ranks`) they are those of the mean over all targets, whichever process holds how many.

    Attributes:
        model: holds the parameters. Build optimizers from it after this object.
        world: the processes.
    """

    def __init__(self, model: Decoder, world: World):
        self.model = model
        self.world = world
        self.summed_loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = model.summed_loss

    def micro_batch(self, last: bool) -> AbstractContextManager:
        """Encloses forward and backward of one part of the batch; only the last one needs to wait for the others."""
        return contextlib.nullcontext()

    def reduce_gradients(self) -> None:
        """Completes the gradients after the backward of the last part; every process must call this."""

    def whole_model(self) -> Decoder | None:
        """A plain model with all parameters in the main process, None elsewhere; every process must call this."""
        return self.model if self.world.is_main else None


def parallelize(
    model: Decoder,
    world: World,
    strategy: Strategy = "ddp",
    dtype: torch.dtype = torch.float32,
) -> Parallel:
    """Spreads a model over the processes, all of which start from the main one's parameters.

    Args:
        model: on this process's device; compile it afterwards.
        world: as `join_world` gave it.
        strategy: ``ddp``: every process has all parameters. ``fsdp``: each has its part of the matrices, and gathers
            a block's whole when it runs; the parameters of the residual stream stay whole and float32 everywhere.
        dtype: in which blocks are gathered under fsdp, and then all their products are; training itself runs under
            autocast to it, whatever the strategy.

    Raises:
        UserError: for an unknown strategy, or a torch too old for it.
    """
    if strategy not in get_args(Strategy):
        raise UserError(f"strategy {strategy!r}: choose {' or '.join(get_args(Strategy))}")
    if world.size == 1:
        return Parallel(model, world)
    if strategy == "ddp":
        return _Replicated(model, world)
    return _Sharded(model, world, dtype)


class _SummedLoss(nn.Module):
    """The loss as a forward method, which is what DDP wraps."""

    def __init__(self, model: Decoder):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.summed_loss(tokens, targets)


def _summed_bucket(group, bucket):  # DDP refuses annotations that are strings, as all are in this file
    """DDP's reduction of a bucket of gradients without its division by the number of processes."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])  # pyright: ignore[reportOptionalMemberAccess]


class _Replicated(Parallel):
    """DistributedDataParallel."""

    def __init__(self, model: Decoder, world: World):
        super().__init__(model, world)
        # DDPOptimizer cuts graphs at bucket borders, to overlap their reduction with one big backward; blocks that
        # are compiled one by one have that overlap already.
        torch._dynamo.config.optimize_ddp = False
        # Buffers are functions of the step here. The option's name changed in torch 2.13.
        names = inspect.signature(nn.parallel.DistributedDataParallel).parameters
        sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
        options: dict[str, Any] = {sync_buffers: False}
        self._ddp = nn.parallel.DistributedDataParallel(_SummedLoss(model), gradient_as_bucket_view=True, **options)
        self._ddp.register_comm_hook(dist.group.WORLD, _summed_bucket)
        self.summed_loss = self._ddp

    def micro_batch(self, last: bool) -> AbstractContextManager:
        return contextlib.nullcontext() if last else self._ddp.no_sync()


class _Sharded(Parallel):
    """FSDP2: ``fully_shard`` of every block and of the rest, replicas of what is too small or too fine to shard."""

    def __init__(self, model: Decoder, world: World, dtype: torch.dtype):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise UserError(f"strategy fsdp needs torch 2.13 or newer, and this is {torch.__version__}; use ddp")
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, 0)
        self._replicas = _unsharded_parameters(model)
        # Inputs are never cast: the norm lane is float32, and autocast casts what enters a product.
        policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        mesh = init_device_mesh(next(model.parameters()).device.type, (world.size,))
        options: dict[str, Any] = {"mesh": mesh, "ignored_params": set(self._replicas)}
        for block in model.blocks:
            fully_shard(block, mp_policy=policy, **options)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # without it, a factor is nccl's alone
                # A sublayer that one process skips must not keep the others waiting; costs nothing where none does.
                module.set_reduce_scatter_unused_params(True, recurse=False)
        _gather_for(model, dtype, "forward", "summed_loss", "score", "trunk")
        super().__init__(model, world)

    def reduce_gradients(self) -> None:
        """Sums the gradients of the replicas in one buffer; where no process has one there is none afterwards."""
        if not self._replicas:
            return
        grads = [parameter.grad for parameter in self._replicas]
        present = torch.tensor([grad is not None for grad in grads], dtype=torch.float32)
        parts = [
            torch.zeros_like(parameter) if grad is None else grad
            for parameter, grad in zip(self._replicas, grads, strict=True)
        ]
        flat = torch.cat([part.flatten() for part in parts] + [present.to(parts[0].device)])
        sum_over_ranks(flat)
        sizes = [part.numel() for part in parts]
        *sums, counts = flat.split([*sizes, len(parts)])
        # Reading the counts waits for the device, so only a process that lacks a gradient looks at them.
        anywhere = counts.tolist() if any(grad is None for grad in grads) else [1.0] * len(parts)
        for parameter, total, count in zip(self._replicas, sums, anywhere, strict=True):
            parameter.grad = total.view_as(parameter) if count else None

    def whole_model(self) -> Decoder | None:
        tensors = {}
        for name, tensor in self.model.state_dict().items():
            whole = whole_tensor(tensor)
            if self.world.is_main:
                tensors[name] = whole.cpu()
        return _decoder_with(self.model, tensors) if self.world.is_main else None


def _unsharded_parameters(model: Decoder) -> list[nn.Parameter]:
    """Parameters that every process keeps whole: vectors, scalars and all float32 modules but the token tables."""
    fine = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, Float32Module) and not isinstance(module, Float32Embedding | Readout)
        for parameter in module.parameters()
    }
    return [parameter for parameter in model.parameters() if parameter.dim() < 2 or id(parameter) in fine]


def _gather_for(model: Decoder, dtype: torch.dtype, *methods: str) -> None:
    """Lets FSDP gather parameters around methods that are called instead of ``forward``.

    One that another of them calls runs as it is: it would give the parameters away before the outer one is done.
    Where blocks are gathered in 16 bit, all run under autocast, which makes their inputs fit.
    """
    from torch.distributed.fsdp import register_fsdp_forward_method

    device_type = next(model.parameters()).device.type
    running: list[str] = []

    def outermost(name: str, plain: Callable, gathering: Callable) -> Callable:
        def method(*args: Any, **kwargs: Any) -> Any:
            if running:
                return plain(*args, **kwargs)
            running.append(name)
            try:
                with autocast(torch.device(device_type), dtype):
                    return gathering(*args, **kwargs)
            finally:
                running.pop()

        return method

    for name in methods:
        plain = getattr(model, name)
        if name != "forward":  # whose hooks are there
            register_fsdp_forward_method(model, name)
        setattr(model, name, outermost(name, plain, getattr(model, name)))


def _decoder_with(model: Decoder, tensors: dict[str, Tensor]) -> Decoder:
    """A plain decoder on the CPU with these parameters, and no other memory."""
    with torch.device("meta"):
        whole = Decoder(model.config)
    whole.load_state_dict(tensors, assign=True)
    if model.config.tie_embeddings:
        whole.readout.weight = whole.embedding.weight
    for module in whole.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                module.register_buffer(name, torch.empty_like(buffer, device="cpu"), persistent=False)
        if isinstance(module, Attention | RotaryTable):
            module.reset_buffers()
    return whole
