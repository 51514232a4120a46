"""Watch a model's residual stream from outside its forward code.

A residual update is the one place that every execution passes, so replacing its methods for a while shows the
whole stream; the model's own code stays free of bookkeeping. Observers are called once per update and should
reduce what they see to a few numbers: nothing here keeps a tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from nagnet.errors import UserError
from nagnet.nn.residual import NormAgnosticResidual, ResidualUpdate
from nagnet.nn.skip import Decision

_ABSENT = object()


@dataclass(frozen=True)
class UpdateStep:
    """One update of the stream as it ran.

    Attributes:
        index: l, 1-based position of the update.
        update: the rule's object for this sublayer.
        before: state the sublayer read; ``.split()`` gives direction [B, T, d] and log norm [B, T].
        branch: the sublayer's output [B, T, d].
        gain: alpha m times the injection scale [B, T], or None for a rule without gains.
        after: state after the update.
    """

    index: int
    update: ResidualUpdate
    before: Any
    branch: Tensor
    gain: Tensor | None
    after: Any

    @property
    def reading(self) -> Tensor:
        """What the sublayer saw [B, T, d], computed anew."""
        return self.update.read(self.before)


@contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Runs ``model`` in evaluation mode, without gradients and uncompiled; on exit all is as it was.

    Compiled code would not see a replaced method, and compiling it for one measurement would cost more than it
    saves.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, training in modes:
            module.training = training
            # FSDP keeps parameters gathered after a pass without a backward: an optimizer step would not reach them.
            if hasattr(type(module), "reshard"):
                cast(Any, module).reshard()


@contextmanager
def observe_updates(model: Any, observer: Callable[[UpdateStep], None]) -> Iterator[None]:
    """Calls ``observer`` after each update of ``model.stream`` while the context lasts, `measuring` included.

    Args:
        model: a `nagnet.Decoder`, compiled or not, or any module whose ``stream.updates`` run through
            ``advance``.
        observer: receives each `UpdateStep` in the order of execution.

    Raises:
        UserError: if the model has no such stream.
    """
    updates = getattr(getattr(model, "stream", None), "updates", None)
    if updates is None:
        raise UserError(f"{type(model).__name__} has no stream.updates to observe; give a nagnet Decoder")

    def watched(update: ResidualUpdate, advance: Callable) -> Callable:
        def advance_and_tell(state, branch, gain, following):
            result = advance(state, branch, gain, following)
            observer(UpdateStep(update.update_index, update, state, branch, gain, result[0]))
            return result

        return advance_and_tell

    with measuring(model), _replaced(updates, "advance", watched):
        yield


def tokens_that_ran(model: Any, step: UpdateStep) -> Tensor:
    """Which tokens ran the sublayer of ``step``, bool [B, T]; the others skipped it (`nagnet.nn.skip`)."""
    if model.skipping is None:
        return torch.ones(step.branch.shape[:-1], dtype=torch.bool, device=step.branch.device)
    return step.update.rotation_score(step.gain) > model.skipping.threshold


@contextmanager
def advancing_by(updates: Iterable[nn.Module], advance: Callable[..., Any]) -> Iterator[None]:
    """Puts ``advance(update, state, branch, gain, following)`` in place of these updates' own while the context lasts.

    It returns the new state, and reading and gain of ``following``, None where there is none. The model must run
    uncompiled (`measuring`).
    """
    with _replaced(updates, "advance", lambda update, own: functools.partial(advance, update)):
        yield


@contextmanager
def observe_gains(
    model: nn.Module, observer: Callable[[NormAgnosticResidual, Any], None]
) -> Iterator[list[NormAgnosticResidual]]:
    """Calls ``observer`` whenever a norm-agnostic update in ``model`` computes its gain, `measuring` included.

    Works for any module that holds `NormAgnosticResidual` modules, however it runs them: ``advance`` is put back
    to its definition for the while, as a fused one need not call ``gain``, and ``write`` calls it where its
    caller did not.

    Args:
        model: any module.
        observer: receives the update and the state it is about to change.

    Yields:
        The updates found, sorted by ``update_index``.

    Raises:
        UserError: if the model holds no norm-agnostic update.
    """
    updates = [module for module in model.modules() if isinstance(module, NormAgnosticResidual)]
    if not updates:
        raise UserError(f"{type(model).__name__} holds no norm-agnostic update, so it has no gains to measure")
    updates.sort(key=lambda update: update.update_index)

    def watched(update: NormAgnosticResidual, gain: Callable) -> Callable:
        def gain_and_tell(state):
            observer(update, state)
            return gain(state)

        return gain_and_tell

    def as_defined(update: NormAgnosticResidual, advance: Callable) -> Callable:
        return ResidualUpdate.advance.__get__(update)

    with measuring(model), _replaced(updates, "gain", watched), _replaced(updates, "advance", as_defined):
        yield updates


@contextmanager
def observe_decisions(model: Any, observer: Callable[[list[Decision]], None]) -> Iterator[None]:
    """Calls ``observer`` once a pass with what the tokens did in all N sublayers, `measuring` included.

    A model that cannot skip decides nothing, and ``observer`` is never called. The model's own counts of what was
    skipped stand still for the while: they belong to what it is scored on.

    Args:
        model: a `nagnet.Decoder`, compiled or not.
        observer: receives N decisions, attention and MLP of each block in turn.
    """
    skipping = getattr(model, "skipping", None)

    def watched(skipping: nn.Module, observe: Callable) -> Callable:
        return lambda decisions, *counted, **options: observer(decisions)

    with measuring(model), _replaced([] if skipping is None else [skipping], "observe", watched):
        yield


@contextmanager
def _replaced(modules: Iterable[nn.Module], name: str, make: Callable[[Any, Callable], Callable]) -> Iterator[None]:
    """Sets the attribute ``name`` of each module, not of its class, to ``make(module, present method)``."""
    with ExitStack() as undo:
        for module in modules:
            undo.callback(_put_back, module, name, module.__dict__.get(name, _ABSENT))
            setattr(module, name, make(module, getattr(module, name)))
        yield


def _put_back(module: nn.Module, name: str, previous: object) -> None:
    if previous is _ABSENT:
        delattr(module, name)
    else:
        setattr(module, name, previous)
