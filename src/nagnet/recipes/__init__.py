"""Named experiments: functions that return a run config. Add one here and it has a name on the command line.

Budgets are FLOPs, so that the two arms of a comparison cost the same.
"""

from __future__ import annotations

from collections.abc import Callable

from nagnet.recipes.failures import walkthrough_collapse, walkthrough_cure, walkthrough_nan
from nagnet.recipes.fineweb_edu import fineweb_edu_24x512
from nagnet.recipes.ladder import ladder_1, ladder_2, ladder_5, ladder_10, ladder_20, ladder_40
from nagnet.recipes.standard_library import stdlib_deep, stdlib_small, stdlib_tiny
from nagnet.recipes.walkthrough import walkthrough_26_1e18, walkthrough_26_3e18, walkthrough_64x640
from nagnet.training.config import RunConfig

RECIPES: dict[str, Callable[[], RunConfig]] = {
    "stdlib-tiny": stdlib_tiny,
    "stdlib-small": stdlib_small,
    "stdlib-deep": stdlib_deep,
    "ladder-40": ladder_40,
    "ladder-20": ladder_20,
    "ladder-10": ladder_10,
    "ladder-5": ladder_5,
    "ladder-2": ladder_2,
    "ladder-1": ladder_1,
    "fineweb-edu-24x512": fineweb_edu_24x512,
    "walkthrough-26-1e18": walkthrough_26_1e18,
    "walkthrough-26-3e18": walkthrough_26_3e18,
    "walkthrough-64x640": walkthrough_64x640,
    "walkthrough-nan": walkthrough_nan,
    "walkthrough-collapse": walkthrough_collapse,
    "walkthrough-cure": walkthrough_cure,
}
