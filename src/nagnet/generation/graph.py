"""Functions of modules that are compiled once and then called with tensors alone, for what decoding repeats."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import compress
from typing import Any

import torch
import torch._inductor
from torch import Tensor, nn
from torch.export import Dim

from nagnet.nn.attention import LayerPast

# Of the compiler: no size is checked before each kernel, and C++ in place of Python calls the kernels of a CPU.
OPTIONS = {"size_asserts": False}
OPTIONS_CPU = OPTIONS | {"cpp_wrapper": True}
# The past that a graph is traced with: C, f and S of `LayerPast`; any numbers that no other size is likely to have.
EXAMPLE_CAPACITY, EXAMPLE_FIRST, EXAMPLE_SLOTS = 22, 4, 7


class Call:
    """A function of modules and inputs, compiled: its modules are chosen here, its inputs come with each call.

    Args:
        function: called with the modules and then the inputs, which are tensors, `LayerPast` and nested tuples of both.
        kind: all that a graph depends on beside the values of tensors and the length of a past. Calls of one function
            and kind share a graph, whatever their modules.
        modules: whose parameters and buffers the function reads; as they are now, not what may replace them.
    """

    def __init__(self, function: Callable, kind: Hashable, *modules: nn.Module):
        self._graph = _graph_of(function, kind)
        self._modules = _Applied(modules)
        named: dict[str, Tensor] = dict(self._modules.named_parameters())
        named.update(self._modules.named_buffers())
        self._names, self._tensors = list(named), list(named.values())
        self._is_prepared = False

    def prepare(self, *inputs: Any) -> None:
        """Compiles the graph unless it is there, for inputs like these."""
        if self._graph.run is None:
            self._graph.compile(self._modules, self._names, self._tensors, inputs)
        n_own = len(self._tensors)
        self._own = list(compress(self._tensors, self._graph.used))
        self._wanted = self._graph.used[n_own:]  # of the inputs
        self._is_prepared = True

    def run(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Calls the graph, once prepared, with all tensors of the inputs, in order, and returns those of the result;
        checks nothing."""
        return self._graph.run([*self._own, *compress(inputs, self._wanted)])

    def __call__(self, *inputs: Any) -> Any:
        """What the function returns."""
        if not self._is_prepared:
            self.prepare(*inputs)
        found = self.run(tensors_in(inputs))
        return _filled(self._graph.result, iter(found))


@functools.cache
def _graph_of(function: Callable, kind: Hashable) -> Graph:
    """The graph of a function for steps of one kind."""
    return Graph(function)


class Graph:
    """A function that is compiled at its first call, and then called with tensors alone, nothing of which is checked.

    Torch's own way from a call to its graph (conditions on a hundred parameters and attributes, and the search for
    a graph that meets them) would take longer than the residual updates of a block of width 768. Who calls must bring
    modules and inputs of one kind.
    """

    def __init__(self, function: Callable):
        self._function = function
        self.run: Any = None  # called with a list of the tensors that it reads, which it empties
        self.used: list[bool] = []  # of the tensors of modules and inputs, those that it reads
        self.result: Any = None  # like the function's result, with Tensor in place of each tensor

    def compile(self, modules: _Applied, names: list[str], tensors: list[Tensor], inputs: tuple) -> None:
        """Makes the graph of the function for these modules, their tensors by name, and inputs."""
        examples = tuple(_example(value) if isinstance(value, LayerPast) else value for value in inputs)
        structure = _structure(examples)

        def flat(*values: Tensor) -> list[Tensor]:
            own = dict(zip(names, values[: len(names)], strict=True))
            arguments = (self._function, *_filled(structure, iter(values[len(names) :])))
            # With ties it would swap a module that is here twice two times, and leave the wrong tensors in it.
            result = torch.func.functional_call(modules, own, arguments, tie_weights=False)
            self.result = _structure(result)
            return tensors_in(result)

        given = (*tensors, *tensors_in(examples))
        growing = _growing_sizes(examples)
        sizes = tuple(dict.fromkeys(growing.get(id(tensor), ()), Dim.DYNAMIC) or None for tensor in given)
        self.run, self.used = _compiled(flat, given, sizes)


def _compiled(
    function: Callable[..., list[Tensor]], given: tuple[Tensor, ...], sizes: tuple
) -> tuple[Callable[[list[Tensor]], Sequence[Tensor]], list[bool]]:
    """A function of tensors like the given ones, compiled, and which of them it takes: those that it reads."""
    graph = torch.export.export(_AsModule(function), given, dynamic_shapes=(sizes,)).graph_module
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    used = [bool(node.users) for node in placeholders]
    for node in compress(placeholders, map(operator.not_, used)):
        graph.graph.erase_node(node)
    graph.recompile()
    examples = [node.meta["val"] for node in compress(placeholders, used)]
    options = OPTIONS_CPU if given[0].device.type == "cpu" else OPTIONS
    compiled: Any = torch._inductor.compile(graph, examples, options=options)
    return _kernels_of(compiled) or (lambda tensors: compiled(*tensors)), used


def _kernels_of(compiled: Any) -> Callable[[list[Tensor]], Sequence[Tensor]] | None:
    """What calls the kernels, inside of what serves autograd, autocast and profilers (a tenth of a step that skips
    all), or None where this torch hides it."""
    return getattr(inspect.unwrap(compiled), "current_callable", None)


class _Applied(nn.ModuleList):
    """Modules that a function is called with, before its inputs."""

    def forward(self, function: Callable, *inputs: Any) -> Any:
        return function(*self, *inputs)


class _AsModule(nn.Module):
    """A function as a module without parameters."""

    def __init__(self, function: Callable):
        super().__init__()
        self._function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self._function(*tensors)


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of nested tuples and lists, or of one tensor, in order."""
    if isinstance(value, Tensor):
        return [value]
    found = []
    for part in value if isinstance(value, (tuple, list)) else ():
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, (tuple, list)):
            found += tensors_in(part)
    return found


def _structure(value: Any) -> Any:
    """Nested tuples and lists with the class Tensor in place of each tensor."""
    if isinstance(value, Tensor):
        return Tensor
    return _like(value, [_structure(part) for part in value]) if isinstance(value, (tuple, list)) else value


def _filled(structure: Any, tensors: Iterator[Tensor]) -> Any:
    """A structure with tensors again."""
    if structure is Tensor:
        return next(tensors)
    if not isinstance(structure, (tuple, list)):
        return structure
    return _like(structure, [next(tensors) if part is Tensor else _filled(part, tensors) for part in structure])


def _like(example: Any, parts: list) -> Any:
    """Parts as a list, tuple or named tuple."""
    return example._make(parts) if hasattr(example, "_make") else type(example)(parts)


def _example(past: LayerPast) -> LayerPast:
    """A past of several slots, to compile for any number: what is compiled for one slot serves no other number."""
    batch_size, heads, _, width = past.keys.shape
    keys, values = (past.keys.new_zeros(batch_size, heads, EXAMPLE_CAPACITY + 1, width) for _ in range(2))
    ruler = past.ruler.new_empty(EXAMPLE_FIRST + 1, EXAMPLE_SLOTS + 1, 0)
    allowed = None if past.allowed is None else past.allowed.new_ones(*past.allowed.shape[:3], EXAMPLE_SLOTS)
    return past._replace(keys=keys, values=values, ruler=ruler, allowed=allowed)


def _growing_sizes(inputs: Sequence[Any]) -> dict[int, tuple[int, ...]]:
    """By the id of a tensor, which of its sizes differ between steps and caches."""
    growing: dict[int, tuple[int, ...]] = {}
    for past in inputs:
        if isinstance(past, LayerPast):
            growing |= {id(past.keys): (2,), id(past.values): (2,), id(past.ruler): (0, 1), id(past.allowed): (3,)}
    return growing
