"""List the recipes: name, what it is, parameters and training FLOPs of each arm."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass
class Options:
    """How to list them."""

    json: bool = False
    """Print JSON, for a program to read."""


def main(options: Options) -> None:
    """Prints one line a recipe."""
    from nagnet.models.flops import parameter_counts
    from nagnet.recipes import RECIPES

    rows = []
    for name, recipe in RECIPES.items():
        config = recipe()
        rows.append(
            {
                "recipe": name,
                "summary": (recipe.__doc__ or "").splitlines()[0],
                "parameters": parameter_counts(config.model)["total"],
                "training_flops": config.flops,
            }
        )
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(f"{row['recipe']}: {row['summary']} {row['parameters']:,} parameters, {row['training_flops']:.3g} FLOPs")
