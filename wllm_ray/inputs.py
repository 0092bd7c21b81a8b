"""What Python callers pass, as rows that have been checked by the rules for all inputs."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from wllm_ray.digest import canonical_json, parse_json
from wllm_ray.errors import InvalidInputError
from wllm_ray.records import InputRow
from wllm_ray.rows import parse_objects

__all__ = ["Input", "as_list", "input_rows"]

Input: TypeAlias = (
    str
    | Sequence[Mapping[str, Any]]
    | Sequence[int]
    | NDArray[np.integer[Any]]
    | Mapping[str, Any]  # a row as in a file
)
Item = TypeVar("Item", int, str)


def input_rows(
    inputs: Iterable[Input],
    row_ids: Iterable[str] | None = None,
    metadata: Iterable[Mapping[str, Any]] | None = None,
) -> list[InputRow]:
    """Make rows of prompts, conversations and token ids.

    Args:
        inputs: Each a string, a list of messages, or token ids (a list or an integer array); or
            all of them rows as in a file, with ids and metadata of their own.
        row_ids: One id per input; default ``row-000000`` and so on.
        metadata: One mapping per input.

    Raises:
        InvalidInputError: An input of another type, lists of different lengths, or rows that
            break the input rules (``invalid_rows``).
    """
    if isinstance(inputs, (str, bytes, Mapping)):
        raise InvalidInputError(
            f"`inputs` is a list of inputs, found one {type(inputs).__name__}; put it into a list",
            code="invalid_argument",
        )
    values = list(inputs)
    if any(isinstance(value, Mapping) for value in values):
        return _whole_rows(values, has_more=row_ids is not None or metadata is not None)
    contents = [_content(number, value) for number, value in enumerate(values)]
    ids = _per_input("row_ids", row_ids, len(contents))
    ids = ids or [f"row-{number:06d}" for number in range(len(contents))]
    extra = _per_input("metadata", metadata, len(contents)) or [{}] * len(contents)
    return parse_objects(
        {"id": row_id, "metadata": _plain("metadata", number, value), **content}
        for number, (row_id, value, content) in enumerate(zip(ids, extra, contents, strict=True))
    )


def as_list(name: str, kind: type[Item], value: Any) -> list[Item] | None:
    """A list of layers or sites; one alone is a list of one.

    Raises:
        InvalidInputError: Something else.
    """
    if value is None:
        return None
    one = isinstance(value, (str, int, np.integer))
    try:
        items = [value] if one else list(value)
        return [_item(kind, item) for item in items]
    except TypeError:
        raise InvalidInputError(
            f"`{name}` is a list of {kind.__name__}, or one {kind.__name__}; found {value!a:.80}",
            code="invalid_argument",
        ) from None


def _item(kind: type[Item], value: Any) -> Item:
    if kind is int and not isinstance(value, bool):
        return kind(operator.index(value))
    if isinstance(value, kind) and not isinstance(value, bool):
        return value
    raise TypeError


def _whole_rows(values: list[Any], *, has_more: bool) -> list[InputRow]:
    if has_more:
        raise InvalidInputError(
            "inputs that are rows, {'id': …, 'prompt': …, 'metadata': …}, carry their own ids and "
            "metadata; leave out row_ids and metadata, or pass bare prompts",
            code="invalid_argument",
        )
    for number, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise InvalidInputError(
                f"input {number}: expected a row like those beside it, {{'id': …, 'prompt': …}}, "
                f"found {type(value).__name__}; pass rows only, or none",
                code="invalid_argument",
            )
    return parse_objects(_row(number, value) for number, value in enumerate(values))


def _row(number: int, value: Mapping[str, Any]) -> dict[str, Any]:
    row = dict(value)
    for name in ("messages", "metadata"):
        if name in row:
            row[name] = _plain(name, number, row[name])
    if isinstance(row.get("token_ids"), (tuple, list, np.ndarray)):
        row |= {"token_ids": None} | _content(number, row["token_ids"])
    return row


def _per_input(name: str, values: Iterable[Any] | None, count: int) -> list[Any] | None:
    if values is None:
        return None
    found = list(values)
    if len(found) != count:
        raise InvalidInputError(
            f"`{name}` needs one entry per input: expected {count}, found {len(found)}",
            code="invalid_argument",
        )
    return found


def _content(number: int, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"prompt": value}
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind not in "iu":
            raise InvalidInputError(
                f"input {number}: token ids are a one-dimensional integer array, found shape "
                f"{value.shape} of {value.dtype}",
                code="invalid_argument",
            )
        return {"token_ids": value.tolist()}
    if not isinstance(value, (list, tuple)):
        raise InvalidInputError(
            f"input {number}: expected a string, a list of messages or token ids, found "
            f"{type(value).__name__}",
            code="invalid_argument",
        )
    if value and all(isinstance(item, Mapping) for item in value):
        return {"messages": _plain("messages", number, value)}
    return {"token_ids": [int(x) if isinstance(x, np.integer) else x for x in value]}


def _plain(name: str, number: int, value: Any) -> Any:
    """The value as JSON has it: tuples become lists, and what JSON cannot say is refused."""
    try:
        return parse_json(canonical_json(value))
    except TypeError as error:
        raise InvalidInputError(
            f"input {number}: `{name}` holds something that JSON cannot say ({error})",
            code="invalid_argument",
        ) from None
