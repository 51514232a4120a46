"""Pages from the templates beside this module: each is one file that needs nothing else and no network."""

from __future__ import annotations

from typing import Any

from nagnet.errors import UserError


def render(template: str, **values: Any) -> str:
    """Fills a template; text is escaped for HTML, and ``tojson`` for a script element.

    Args:
        template: file in ``diagnostics/templates``. values: all that it names.

    Raises:
        UserError: if jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise UserError("the report needs jinja2: pip install 'nagnet[report]'") from error
    environment = Environment(
        loader=PackageLoader("nagnet.diagnostics"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {
        "separators": (",", ":"),
        "ensure_ascii": False,
        "allow_nan": False,
    }
    return environment.get_template(template).render(values)
