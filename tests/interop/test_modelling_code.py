"""Generated modelling code: this package's own sources, in a flat folder that stands alone."""

import ast
import sys

import pytest

from nagnet.interop import modelling_code as module
from nagnet.interop.modelling_code import modelling_code

ENTRY = "nagnet.interop.hf_model"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Puts other sources in the place of this package's."""

    def write(files):
        for name, source in files.items():
            path = tmp_path / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        monkeypatch.setattr(module, "_ROOT", tmp_path)

    return write


def imported_packages(source):
    tree = ast.parse(source)
    guarded = {inner for node in ast.walk(tree) if isinstance(node, ast.Try) for inner in ast.walk(node)}
    names = set()
    for node in ast.walk(tree):
        if node in guarded:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(str(node.module).partition(".")[0])
    return names


def test_torch_and_transformers_are_all_that_it_needs():
    sources = modelling_code(ENTRY, "entry")
    assert {"entry.py", "nagnet_nn_stream.py", "nagnet_ops.py", "nagnet_ops_reference.py"} <= sources.keys()
    packages = {name: imported_packages(source) - set(sys.stdlib_module_names) for name, source in sources.items()}
    assert packages.pop("entry.py") == {"torch", "transformers"}
    assert set().union(*packages.values()) == {"torch"}
    assert all(source.startswith("# Generated from nagnet.") for source in sources.values())


def test_the_code_is_the_source_but_for_imports():
    sources = modelling_code(ENTRY, "entry")
    own = (module._ROOT / "nn" / "rotary.py").read_text().splitlines()
    generated = sources["nagnet_nn_rotary.py"].splitlines()[1:]
    assert len(own) == len(generated)
    changed = [(a, b) for a, b in zip(own, generated, strict=True) if a != b]
    assert changed and all(a.startswith("from nagnet.") and b.startswith("from .nagnet_") for a, b in changed)


def test_every_file_is_named_where_transformers_looks(package):
    """It follows lines `from .name import`, of which `from . import name` is none."""
    package({"entry": "from nagnet.a import b\n", "a/b": "from nagnet.a.c import x as y\n", "a/c": "x = 1\n"})
    sources = modelling_code("nagnet.entry", "model")
    assert "from . import nagnet_a_b as b\n" in sources["model.py"]
    assert "from .nagnet_a_c import x as y\n" in sources["nagnet_a_b.py"]
    assert {"nagnet_a_b", "nagnet_a_c"} == {
        node.module
        for node in ast.walk(ast.parse(sources["model.py"]))
        if isinstance(node, ast.ImportFrom) and node.module
    }


FORMS = """\
from __future__ import annotations

from typing import TYPE_CHECKING

from nagnet.a import (
    b as other,
    value,  # kept
)
from nagnet import c

if TYPE_CHECKING:
    from nagnet.never import Seen
    from jaxtyping import Float
else:
    # a comment
    Float = str


def late():
    if True:
        from nagnet.c import (
            x,
            y,
        )
        from nagnet import c as again
    return x, y, c, other, again
"""


def test_forms_of_imports(package):
    package({"entry": FORMS, "a/__init__": "value = 3\n", "a/b": "", "c": "x, y = 1, 2\n"})
    sources = modelling_code("nagnet.entry", "model")
    assert sources.keys() == {"model.py", "nagnet_a.py", "nagnet_a_b.py", "nagnet_c.py"}
    entry = sources["model.py"]
    assert "from . import nagnet_a_b as other\nfrom .nagnet_a import value\nfrom . import nagnet_c as c\n" in entry
    assert "        from .nagnet_c import (\n            x,\n            y,\n        )\n" in entry
    assert "\n        from . import nagnet_c as again\n" in entry
    assert "\nFloat = str\n" in entry and "jaxtyping" not in entry and "Seen" not in entry
    compile(entry, "entry", "exec")


@pytest.mark.parametrize("line", ["import nagnet.a", "from . import a", "from .a import x"])
def test_an_import_without_a_flat_form_is_refused(package, line):
    package({"entry": f"x = 1\n{line}\n", "a": "x = 1\n"})
    with pytest.raises(ValueError, match=r"nagnet\.entry, line 2"):
        modelling_code("nagnet.entry", "model")
