"""Fill in the page.

Everything that a dataset says is somebody else's text: ids, metadata, names, messages. Jinja2
escapes all of it, what cannot be seen is shown as an escape sequence, and pictures are `img`
elements, in which nothing runs. The page's own policy forbids scripts and every outside resource.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from wllm_ray.errors import StorageError
from wllm_ray.extras import require_extra

__all__ = ["render", "write_page"]

_FOLDER = Path(__file__).parent
_MOST_CHARACTERS = 400


def render(facts: dict[str, Any]) -> str:
    """The page as HTML, from the facts that ``page.html`` names.

    Raises:
        ModuleNotFoundError: Jinja2 is not installed.
    """
    jinja2 = require_extra("jinja2")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        finalize=_visible,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "count": _count,
        "counted": _counted,
        "number": _number,
        "picture": _picture,
    }
    style = (_FOLDER / "page.css").read_text(encoding="utf-8")
    page: str = environment.get_template("page.html").render(
        facts, style=style, style_hash=_source_hash(style)
    )
    return page


def write_page(path: Path, html: str) -> None:
    """Write a page; a text that UTF-8 cannot hold, half of a surrogate pair, is shown escaped.

    Raises:
        StorageError: It cannot be written there.
    """
    try:
        path.write_bytes(html.encode(errors="backslashreplace"))
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}; see --output") from None


def _visible(value: Any) -> Any:
    """Text in which every character can be seen, and not too much of it.

    Left alone is what the page itself calls safe: its style sheet and its pictures.
    """
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    if len(value) > _MOST_CHARACTERS:
        value = f"{value[:_MOST_CHARACTERS]}… ({len(value):,} characters)"
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in value)


def _counted(number: int, noun: str) -> str:
    """For example ``1 row`` or ``2,000 rows``."""
    return f"{_count(number)} {noun}{'' if number == 1 else 's'}"


def _count(number: int) -> str:
    return f"{number:,}"


def _number(number: float) -> str:
    """Four digits, and no exponent where there need not be one."""
    return f"{number:,.0f}" if 1000 <= abs(number) < 1e9 else f"{number:.4g}"  # noqa: PLR2004


def _picture(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _source_hash(text: str) -> str:
    """The hash by which the policy allows this text."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
