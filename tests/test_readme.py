"""The README's Python runs as printed, from the plain wheel, in an environment that holds torch and nothing else."""

import importlib.metadata
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


def _needed_by(name: str, found: set[str]) -> set[str]:
    """Names of the distribution and of all that it requires on this machine, without extras."""
    if name in found:
        return found
    found.add(name)
    for line in importlib.metadata.requires(name) or []:
        requirement = Requirement(line)
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and _installed(requirement.name):
            _needed_by(requirement.name, found)
    return found


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """An interpreter that sees the built wheel, torch, and what torch requires; torch is linked, not downloaded."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder / "venv", with_pip=True)
    interpreter = folder / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    install = [interpreter, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, capture_output=True)
    site = subprocess.run(
        [interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    for name in _needed_by("torch", set()):
        for file in importlib.metadata.files(name) or []:
            top = file.parts[0]
            target = Path(site) / top
            if top != ".." and not target.exists():
                target.symlink_to(Path(str(importlib.metadata.distribution(name).locate_file(top))).resolve())
    return interpreter


def _run(python: Path, code: str) -> subprocess.CompletedProcess:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run(
        [python, "-W", "ignore::UserWarning", "-c", code], capture_output=True, text=True, env=environment
    )


def test_environment_holds_torch_but_not_the_extras(python):
    run = _run(
        python,
        "import torch, importlib.util as u; print([n for n in ('numpy', 'tokenizers', 'rich') if u.find_spec(n)])",
    )
    assert run.stdout.strip() == "[]", run.stderr


@pytest.mark.parametrize("snippet", SNIPPETS, ids=["first screen", "foreign model"])
def test_snippet_runs_as_printed(python, snippet):
    run = _run(python, snippet)
    assert run.returncode == 0, run.stderr
    losses = [float(value) for value in re.findall(r"loss (\d+\.\d+)", run.stdout)]
    if losses:
        assert len(losses) == 5 and losses[-1] < losses[0]
        assert "collapsed updates: []" in run.stdout


def test_command_without_its_extras_says_what_to_install(python):
    run = _run(python, "from nagnet.cli.application import run; raise SystemExit(run(['demo']))")
    assert run.returncode == 2
    assert "pip install 'nagnet[train" in run.stderr and len(run.stderr.strip().splitlines()) == 1
