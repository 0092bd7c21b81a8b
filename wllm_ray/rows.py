"""From JSONL lines or JSON objects to rows.

``parse_rows`` is all or nothing: a malformed line refuses the whole input, with every offending
line listed, before anything runs.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from wllm_ray.digest import canonical_text, parse_json
from wllm_ray.errors import InvalidInputError
from wllm_ray.records import InputRow
from wllm_ray.usual_rows import MAX_ID_BYTES, usual_row
from wllm_ray.validation import unknown_field

__all__ = [
    "RowProblem",
    "check_row",
    "has_lone_surrogate",
    "id_of",
    "parse_objects",
    "parse_rows",
    "raise_problems",
    "read_jsonl",
    "repeated_id",
    "utf8_bytes",
]

MAX_METADATA_BYTES = 64 * 1024
MAX_DEPTH = 32
# A message that lists more would not be read; the count says how many there are.
MAX_LISTED_PROBLEMS = 50

_CONTENT_KEYS = ("prompt", "messages", "token_ids")
_KEYS = ("id", *_CONTENT_KEYS, "metadata")
_KNOWN_KEYS = frozenset(_KEYS)
_INTEGERS_ONLY = frozenset({int})
_FLAT = frozenset({str, int, float, bool, type(None)})


@dataclass(frozen=True, slots=True)
class RowProblem:
    """One malformed row: where, and what was expected and found. Never holds prompt text.

    Attributes:
        line: Where it stands, counted from 1.
        message: What is wrong.
        row_id: Its id, where that can be read in spite of what is wrong.
    """

    line: int
    message: str
    row_id: str | None = None

    def repeating(self, before: int) -> RowProblem:
        """The same row, whose id was used before as well."""
        return replace(self, message=f"{self.message}; {_repeats(before)}")


def _repeats(before: int) -> str:
    return f"`id` was used before, on line {before}"


def has_lone_surrogate(value: Any) -> bool:
    """Whether some text in a JSON value holds half of a surrogate pair."""
    if isinstance(value, str):
        return not value.isascii() and not _is_utf8(value)
    if isinstance(value, dict):
        return any(map(has_lone_surrogate, value)) or any(map(has_lone_surrogate, value.values()))
    return isinstance(value, list) and any(map(has_lone_surrogate, value))


def utf8_bytes(text: str) -> int:
    """How many bytes of UTF-8 a text takes; half of a surrogate pair counts as three."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _too_deep(value: Any, room: int) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    children = value.values() if isinstance(value, dict) else value
    if room == 0 or _FLAT.issuperset(map(type, children)):
        return room == 0
    return any(_too_deep(child, room - 1) for child in children)


def _check_id(value: Any) -> str | None:
    if type(value) is str and value.isascii() and 0 < len(value) <= MAX_ID_BYTES:
        return None
    if not isinstance(value, str) or not value:
        return f"`id` must be a non-empty string, found {type(value).__name__}"
    if has_lone_surrogate(value):
        return "`id` holds half of a surrogate pair, which UTF-8 cannot carry"
    if (size := utf8_bytes(value)) > MAX_ID_BYTES:
        return f"`id` must be at most {MAX_ID_BYTES} bytes of UTF-8, found {size}"
    return None


def _check_metadata(value: Any) -> str | None:
    if type(value) is dict and _FLAT.issuperset(map(type, value.values())):
        return None
    if not isinstance(value, dict):
        return f"`metadata` must be an object, found {type(value).__name__}"
    if _too_deep(value, MAX_DEPTH):
        return f"`metadata` is nested more than {MAX_DEPTH} deep"
    return None


def _check_content(key: str, value: Any) -> str | None:
    if key == "prompt":
        if type(value) is str:
            return None
        good, want = isinstance(value, str), "a string"
    elif key == "messages":
        good = isinstance(value, list) and all(isinstance(item, dict) for item in value)
        want = f"a list of objects, nested at most {MAX_DEPTH} deep"
        good = good and not _too_deep(value, MAX_DEPTH)
    else:
        good = isinstance(value, list) and _INTEGERS_ONLY.issuperset(map(type, value))
        want = "a list of integers"
    return None if good else f"`{key}` must be {want}"


def check_row(value: Any) -> InputRow | str:
    """Check one decoded row; return it, or what is wrong with it.

    Args:
        value: What the JSON decoder made of the line.
    """
    if not isinstance(value, dict):
        return f"a row must be a JSON object, found {type(value).__name__}"
    if not _KNOWN_KEYS.issuperset(value):
        return unknown_field(next(key for key in value if key not in _KNOWN_KEYS), _KEYS)
    if "id" not in value:
        return "`id` is missing"
    if problem := _check_id(value["id"]):
        return problem
    present = [key for key in _CONTENT_KEYS if key in value]
    if len(present) != 1:
        found = ", ".join(present) or "none"
        return f"exactly one of {', '.join(_CONTENT_KEYS)} is needed, found {found}"
    metadata = value.get("metadata", {})
    if problem := _check_content(present[0], value[present[0]]) or _check_metadata(metadata):
        return problem
    text = canonical_text(metadata)
    if (size := utf8_bytes(text)) > MAX_METADATA_BYTES:
        return f"`metadata` must be at most {MAX_METADATA_BYTES} bytes of JSON, found {size}"
    return InputRow(value["id"], {present[0]: value[present[0]]}, text)


def _checked(number: int, value: Any) -> InputRow | RowProblem:
    """Check one decoded row; values that JSON cannot say are a problem of the row as well."""
    try:
        row = check_row(value)
    except InvalidInputError as error:
        row = error.message
    except TypeError as error:
        row = f"`metadata` holds something that JSON cannot say ({error})"
    return RowProblem(number, row, _readable_id(value)) if isinstance(row, str) else row


def _readable_id(value: Any) -> str | None:
    row_id = value.get("id") if isinstance(value, dict) else None
    return None if _check_id(row_id) else row_id


def repeated_id(line: int, item: InputRow | RowProblem, before: int) -> RowProblem:
    """What is wrong with a row whose id was used on the line ``before``."""
    if isinstance(item, RowProblem):
        return item.repeating(before)
    return RowProblem(line, _repeats(before), item.id)


def id_of(item: InputRow | RowProblem) -> str | None:
    """The row's id, where it can be read."""
    return item.row_id if isinstance(item, RowProblem) else item.id


def read_jsonl(stream: BinaryIO) -> Iterator[tuple[int, InputRow | RowProblem]]:
    r"""Read rows from a JSONL byte stream, one line at a time.

    Lines end at ``\n`` only and a ``\r`` before it is dropped; blank lines are skipped but
    counted. A byte order mark at the beginning of the stream is dropped.

    Yields:
        (line number from 1, the row or its problem).
    """
    for number, raw in enumerate(stream, start=1):
        line = raw.removesuffix(b"\n").removesuffix(b"\r")
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if (row := usual_row(line)) is not None:
            yield number, row
            continue
        if not line.strip(b" \t"):
            continue
        try:
            value = parse_json(line)
        except InvalidInputError as error:
            yield number, RowProblem(number, error.message)
        else:
            yield number, _checked(number, value)


def raise_problems(problems: Sequence[RowProblem], total: int | None = None) -> None:
    """Refuse an input because of its malformed rows; does nothing where there are none.

    Args:
        problems: The problems to list.
        total: How many there are, where ``problems`` was cut short.

    Raises:
        InvalidInputError: There are problems (code ``invalid_rows``); details list them.
    """
    if not problems:
        return
    count = total or len(problems)
    listed = problems[:MAX_LISTED_PROBLEMS]
    more = f" (and {count - len(listed)} more)" if count > len(listed) else ""
    lines = "; ".join(f"line {p.line}: {p.message}" for p in listed)
    raise InvalidInputError(
        f"{count} malformed row{'s' if count > 1 else ''}, nothing was run: {lines}{more}",
        code="invalid_rows",
        stage="parse_rows",
        details={
            "problems": [{"line": p.line, "message": p.message} for p in listed],
            "count": count,
        },
    )


def parse_rows(items: Iterable[tuple[int, InputRow | RowProblem]]) -> list[InputRow]:
    """Collect checked rows; refuse all of them if one is malformed or an id occurs twice.

    Args:
        items: (line number, row or problem), as from :func:`read_jsonl`.

    Raises:
        InvalidInputError: Malformed rows (``invalid_rows``), or none at all (``no_rows``).
    """
    rows: list[InputRow] = []
    problems: list[RowProblem] = []
    first_line: dict[str, int] = {}
    for line, item in items:
        row_id = id_of(item)
        before = line if row_id is None else first_line.setdefault(row_id, line)
        if before != line:
            problems.append(repeated_id(line, item, before))
        elif isinstance(item, RowProblem):
            problems.append(item)
        else:
            rows.append(item)
    raise_problems(problems)
    if not rows:
        raise InvalidInputError("the input holds no rows", code="no_rows", stage="parse_rows")
    return rows


def parse_objects(values: Iterable[Any]) -> list[InputRow]:
    """As :func:`parse_rows`, for rows that are decoded already; "line" is the position from 1."""
    return parse_rows((number, _checked(number, value)) for number, value in enumerate(values, 1))
