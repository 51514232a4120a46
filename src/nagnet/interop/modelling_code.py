"""Modelling code for transformers, made from this package's own sources.

Transformers loads a model's code from one flat folder, whose files import each other as ``from .name import ...``. The
files here are nagnet's own, those that an entry module imports, with their imports rewritten: never a second copy.
"""

from __future__ import annotations

import ast
import textwrap
from importlib.metadata import version
from pathlib import Path

import nagnet

PACKAGE = "nagnet"
_ROOT = Path(nagnet.__file__).parent


def modelling_code(entry: str, entry_name: str) -> dict[str, str]:
    """The sources of a module and of all that it imports from this package, directly or not.

    Args:
        entry: dotted name of the module. entry_name: what its file is called, without ``.py``.

    Returns:
        Python sources by file name. They import each other, the standard library, and what the modules import from
        other packages; blocks under ``if TYPE_CHECKING`` are left out.

    Raises:
        ValueError: for an import that has no flat form: ``import nagnet.x`` or a relative one.
    """
    names, waiting = {entry: entry_name}, [entry]
    while waiting:
        for name in _imported(waiting.pop()):
            if name not in names:
                names[name] = name.replace(".", "_")
                waiting.append(name)
    sources = {module: _rewritten(module, names) for module in names}
    # Transformers fetches the files that it sees imported like this, and overlooks `from . import name`.
    listed = [f"from .{name} import __name__ as _  # noqa: F401" for name in sorted(set(names.values()) - {entry_name})]
    header = "# Here so that transformers fetches these files with this one."
    sources[entry] += "\n".join(["", header, *listed, ""])
    return {f"{names[module]}.py": source for module, source in sources.items()}


def _file(module: str) -> Path | None:
    """The source of a module of this package, or None for a name that is none."""
    path = _ROOT.joinpath(*module.split(".")[1:])
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _source(module: str) -> str:
    file = _file(module)
    if file is None:
        raise ValueError(f"{module} is no module of {PACKAGE}")
    return file.read_text(encoding="utf-8")


def _own(node: ast.AST) -> bool:
    """Whether a statement imports from this package."""
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] == PACKAGE for alias in node.names)
    return isinstance(node, ast.ImportFrom) and (node.level > 0 or (node.module or "").partition(".")[0] == PACKAGE)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _statements(tree: ast.AST) -> list[ast.stmt]:
    """Imports from this package and blocks for type checkers, in order; nothing inside of such a block."""
    found: list[ast.stmt] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt) and (_own(node) or _is_type_checking(node)):
            found.append(node)
        else:
            found += _statements(node)
    return found


def _split(module: str, node: ast.stmt) -> tuple[list[tuple[str, ast.alias]], list[ast.alias]]:
    """Modules (with their dotted names) and other names that a statement imports."""
    if not isinstance(node, ast.ImportFrom) or node.level or node.module is None:
        raise ValueError(f"{module}, line {node.lineno}: write it as 'from {PACKAGE}.x import y'")
    modules = [(f"{node.module}.{alias.name}", alias) for alias in node.names]
    modules = [(name, alias) for name, alias in modules if _file(name) is not None]
    aliases = [alias for _, alias in modules]
    return modules, [alias for alias in node.names if alias not in aliases]


def _imported(module: str) -> list[str]:
    """Modules of this package that a module imports, in order."""
    found = []
    for node in _statements(ast.parse(_source(module))):
        if _is_type_checking(node):
            continue
        modules, others = _split(module, node)
        found += [name for name, _ in modules]
        if others:
            assert isinstance(node, ast.ImportFrom)
            found.append(str(node.module))
    return found


def _rewritten(module: str, names: dict[str, str]) -> str:
    """The source with its imports in the flat form, below a line that says where it comes from."""
    source = _source(module)
    lines = source.splitlines()
    for node in reversed(_statements(ast.parse(source))):
        assert node.end_lineno is not None
        part = slice(node.lineno - 1, node.end_lineno)
        if isinstance(node, ast.If):
            lines[part] = _otherwise(node, lines)
            continue
        assert isinstance(node, ast.ImportFrom)
        modules, others = _split(module, node)
        indent = " " * node.col_offset
        new = [f"{indent}from . import {names[name]} as {alias.asname or alias.name}" for name, alias in modules]
        if others and not modules:  # as it was written, but for the module's name
            written = lines[part]
            written[0] = written[0].replace(f"from {node.module} ", f"from .{names[str(node.module)]} ", 1)
            new = written
        elif others:
            new.append(f"{indent}from .{names[str(node.module)]} import {', '.join(map(ast.unparse, others))}")
        lines[part] = new
    header = f"# Generated from {module} of nagnet {version(PACKAGE)} (MIT license)."
    return "\n".join([header, *lines, ""])


def _otherwise(node: ast.If, lines: list[str]) -> list[str]:
    """The lines of the ``else`` branch, one level out."""
    if not node.orelse:
        return []
    last = node.orelse[-1].end_lineno
    body = textwrap.dedent("\n".join(lines[node.orelse[0].lineno - 1 : last]))
    return textwrap.indent(body, " " * node.col_offset).splitlines()
