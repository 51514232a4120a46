"""The wheel: what it needs and what it carries."""

import re
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = out.iterdir()
    return zipfile.ZipFile(path)


def test_base_install_needs_torch_alone(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = message_from_bytes(wheel.read(name))
    base = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert base == ["torch>=2.9"]
    assert metadata["License-Expression"] == "MIT"


def test_wheel_carries_every_file_of_the_package(wheel):
    """Templates and other data too, and nothing beside the package."""
    files = [path for path in (ROOT / "src" / "nagnet").rglob("*") if path.is_file()]
    expected = {path.relative_to(ROOT / "src").as_posix() for path in files if path.suffix != ".pyc"}
    carried = set(wheel.namelist())
    assert expected and expected <= carried
    assert {name.partition("/")[0] for name in carried if ".dist-info/" not in name} == {"nagnet"}


def test_constraints_pin_every_dependency_exactly():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), lines
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    named = set(re.findall(r'"([\w-]+)(?:\[\w+\])?>=', (ROOT / "pyproject.toml").read_text()))
    assert named <= pinned
