"""List the recipes: shape, parameters, budget and steps of the first arm, and what each is.

Parameters are all of them; tokens, steps and training FLOPs (3 x forward, a multiply-add counts 2) are those of the
whole run. Every number can be changed where a recipe is run; docs/recipes.md says how, and what each stands for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass
class Options:
    """How to list them."""

    json: bool = False
    """Print JSON, for a program to read: each recipe with its whole config."""


def main(options: Options) -> None:
    """Prints one row a recipe."""
    from nagnet.recipes import RECIPES

    rows = [_row(name, recipe) for name, recipe in RECIPES.items()]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(
            f"{row['recipe']:21} {row['n_layers']:>3} x {row['d_model']:<4} {row['parameters']:>12,} parameters "
            f"{row['training_flops']:>7.2g} FLOPs {row['steps']:>6,} steps {row['tokens']:>14,} tokens"
        )
        print(f"    {row['summary']}")


def _row(name: str, recipe: Any) -> dict[str, Any]:
    from nagnet.models.flops import parameter_counts
    from nagnet.training.budget import resolve_budget
    from nagnet.training.config import BUDGETS

    config = recipe()
    budget = resolve_budget(config)
    return {
        "recipe": name,
        "summary": (recipe.__doc__ or "").splitlines()[0],
        "n_layers": config.model.n_layers,
        "d_model": config.model.d_model,
        "parameters": parameter_counts(config.model)["total"],
        "budget": {kind: getattr(config, kind) for kind in BUDGETS if getattr(config, kind) is not None},
        "convention": config.convention,
        "training_flops": budget.flops,
        "steps": budget.n_steps,
        "tokens": budget.tokens,
        "data": config.data or "stdlib",
        "config": config.to_dict(),
    }
