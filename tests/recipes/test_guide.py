"""What docs/recipes.md says holds."""

import re
from pathlib import Path

import pytest

from nagnet.recipes import RECIPES
from nagnet.training.budget import resolve_budget

GUIDE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")


def test_its_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    exec(compile(example, "docs/recipes.md", "exec"), {})
    assert "steps of 1,024 tokens" in capsys.readouterr().out


def test_it_names_recipes_that_exist():
    named = set(re.findall(r"`((?:stdlib|walkthrough|fineweb)-[a-z0-9-]+)`", GUIDE))
    assert named and named <= set(RECIPES)


@pytest.mark.parametrize(("name", "tokens"), [("walkthrough-26-1e18", 0.763e9), ("walkthrough-26-3e18", 2.29e9)])
def test_small_pairs_meet_the_walkthroughs_tokens(name, tokens):
    assert resolve_budget(RECIPES[name]()).tokens == pytest.approx(tokens, rel=0.002)
