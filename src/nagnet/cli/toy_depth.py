"""Send a vector through random layers, each 0.5 x orthogonal, with and without a residual stream.

Writes toy_depth.png, toy_depth.svg and summary.json, and prints by how many decades the norm changes.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from nagnet.cli.output_folder import claim_output_folder


@dataclass
class Options:
    """What to compute and where to write it."""

    out: Path
    """Folder for the figure and the numbers; it must be new or empty."""
    depth: int = 60
    """Number of layers."""
    d_model: int = 64
    """Width of the vector, in numbers."""
    seed: int = 0
    """Seed of the vector and of the layers."""
    force: bool = False
    """Delete an earlier run in the output folder first."""
    json: bool = False
    """Print the numbers as JSON, for a program to read."""


def main(options: Options) -> None:
    """Compute, write the files, print the result."""
    from nagnet.diagnostics.style import save_figure
    from nagnet.diagnostics.toy_depth import toy_depth, toy_depth_figure

    result = toy_depth(options.depth, options.d_model, options.seed)
    folder = claim_output_folder(options.out, options.force)
    files = save_figure(toy_depth_figure(result), folder, "toy_depth")
    summary = {
        "depth": options.depth,
        "d_model": options.d_model,
        "seed": options.seed,
        "plain_decades": result.plain_decades,
        "residual_decades": result.residual_decades,
        "plain_norm_ratio": result.plain.tolist(),
        "residual_norm_ratio": result.residual.tolist(),
        "files": [str(path) for path in files],
    }
    text = json.dumps(summary, indent=2)
    (folder / "summary.json").write_text(text + "\n", encoding="utf-8")
    if options.json:
        print(text)
        return
    print(f"norm after {options.depth} layers, d_model {options.d_model}, seed {options.seed}")
    print(f"  x <- W x      {result.plain_decades:+.2f} decades")
    print(f"  x <- x + W x  {result.residual_decades:+.2f} decades")
    print(f"figure: {files[0]}")
