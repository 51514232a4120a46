"""Configs made from plain values and from ``KEY=VALUE`` text, checked against the annotations of their fields."""

from __future__ import annotations

import dataclasses
import difflib
import sys
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from nagnet.errors import UserError

Config = TypeVar("Config")
EXPECTED = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}
WORDS = {"none": None, "null": None, "true": True, "false": False}


def coerce_fields(config: Any, prefix: str = "") -> None:
    """Brings every field of a dataclass to its annotated type, in place; for use in ``__post_init__``.

    Whole floats become integers, integers floats, lists tuples and dictionaries nested dataclasses; nothing else is
    converted.

    Args:
        prefix: put before the field's name in errors.

    Raises:
        UserError: naming the field that has another type.
    """
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = _typed(hints[field.name], getattr(config, field.name), prefix + field.name)
        object.__setattr__(config, field.name, value)


def from_plain(cls: type[Config], values: dict[str, Any], what: str) -> Config:
    """Builds a dataclass from plain values, as JSON gives them.

    Args:
        what: name of the thing in errors, such as ``run config``.

    Raises:
        UserError: for an unknown key, naming the nearest one, a missing key, or a value of the wrong type.
    """
    fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, cls))}
    for key in values:
        if key not in fields:
            raise _unknown_key(key, list(fields), f" in {what}")
    for name, field in fields.items():
        if name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise UserError(f"{what} has no {name!r}")
    return cls(**values)


def override(config: Config, assignments: Sequence[str]) -> Config:
    """A copy of a config with fields changed by text.

    Example: ``override(run, ["optimizer.matrix_lr=0.01", "model.n_layers=8", "seq_len=512"])``. Dots lead into nested
    configs, ``none`` empties a field that may be empty, and numbers separated by commas fill a tuple. Of two
    assignments to one key the later holds. Fields that follow from others (d_ff from d_model) follow the change.

    Args:
        config: a dataclass; one with a method ``replace(**changes)`` is changed by that.
        assignments: each ``KEY=VALUE``.

    Raises:
        UserError: for text without ``=``, an unknown key (with the nearest one), or a value that does not fit.
    """
    tree: dict[str, Any] = {}
    known = list(_leaves(config))
    for assignment in assignments:
        key, equals, text = (part.strip() for part in assignment.partition("="))
        if not equals:
            raise UserError(f"{assignment!r} is no assignment; write KEY=VALUE, such as {known[0]}=VALUE")
        if key not in known:
            inside = [name for name in known if name.startswith(f"{key}.")]
            if inside:
                raise UserError(f"{key} is a group of keys; set one of them, such as {inside[0]}")
            raise _unknown_key(key, known)
        *groups, name = key.split(".")
        branch = tree
        for group in groups:
            branch = branch.setdefault(group, {})
        branch[name] = text
    return _apply(config, tree, "")


def _leaves(config: Any, prefix: str = "") -> Iterable[str]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def _apply(config: Any, tree: dict[str, Any], prefix: str) -> Any:
    hints = get_type_hints(type(config))
    changes = {
        name: _typed(hints[name], _parsed(hints[name], text), prefix + name)
        for name, text in tree.items()
        if isinstance(text, str)
    }
    if changes:
        replace = getattr(config, "replace", None)
        config = replace(**changes) if replace else dataclasses.replace(config, **changes)
    # After the config's own fields: another residual rule brings another readout, which these then change.
    nested = {
        name: _apply(getattr(config, name), branch, f"{prefix}{name}.")
        for name, branch in tree.items()
        if isinstance(branch, dict)
    }
    return dataclasses.replace(config, **nested) if nested else config


def _parsed(annotation: Any, text: str) -> Any:
    """The plain value that ``text`` stands for in a field of this type."""
    kinds = _alternatives(annotation)
    lowered = text.lower()
    if lowered in ("none", "null") and type(None) in kinds:
        return None
    if str in kinds:
        return text
    if any(get_origin(kind) is tuple for kind in kinds):
        return [_number_or_word(part.strip()) for part in text.strip("[]()").split(",") if part.strip()]
    return _number_or_word(text)


def _number_or_word(text: str) -> Any:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    union = get_origin(annotation) in (Union, types.UnionType)
    return get_args(annotation) if union else (annotation,)


def _typed(annotation: Any, value: Any, name: str) -> Any:
    """``value`` as the annotated type: a basic type, a literal, a tuple, a dataclass, or one of these or None."""
    kinds = _alternatives(annotation)
    if value is None and type(None) in kinds:
        return None
    kind: Any = next(kind for kind in kinds if kind is not type(None))
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        raise UserError(f"{name} is {value!r}; choose {', '.join(map(str, get_args(kind)))}")
    if get_origin(kind) is tuple:
        return _typed_tuple(get_args(kind), value, name)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        build = getattr(kind, "from_dict", None)
        return build(value) if build else from_plain(typing.cast(Any, kind), value, name)
    return _typed_scalar(kind, value, name)


def _typed_scalar(kind: Any, value: Any, name: str) -> Any:
    if kind in (int, float):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and abs(value) <= sys.float_info.max and kind(value) == value:
            return kind(value)
    elif isinstance(value, kind):
        return value
    raise UserError(f"{name} is {value!r}; give {EXPECTED.get(kind, f'a {kind.__name__}')}")


def _typed_tuple(kinds: tuple[Any, ...], value: Any, name: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise UserError(f"{name} is {value!r}; give values separated by commas")
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(value)
    if len(kinds) != len(value):
        raise UserError(f"{name} has {len(value)} values; give {len(kinds)}")
    return tuple(_typed(kind, part, name) for kind, part in zip(kinds, value, strict=True))


def _unknown_key(key: str, known: Sequence[str], where: str = "") -> UserError:
    # A key that lacks its group is nearest to the one that ends in it.
    ending = [name for name in known if name.split(".")[-1] == key]
    nearest = (ending or difflib.get_close_matches(key, known, n=1, cutoff=0.0))[0]
    return UserError(f"unknown key {key!r}{where}; did you mean {nearest!r}?")
