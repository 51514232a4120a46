"""Array annotations that cost nothing at run time.

Public signatures of ``ops`` and ``nn`` carry jaxtyping shapes. The base install needs torch alone, so where
jaxtyping is absent the annotation falls back to the bare array type. The test suite checks the shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ImportError:

        class _Unchecked:
            def __class_getitem__(cls, item):
                return item[0]

        Bool = Float = Int = _Unchecked

__all__ = ["Bool", "Float", "Int"]
