"""What Python callers pass, as rows that have been checked by the rules for all inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from wllm_ray.digest import canonical_json, parse_json
from wllm_ray.errors import InvalidInputError
from wllm_ray.records import InputRow
from wllm_ray.rows import parse_objects

__all__ = ["Input", "input_rows"]

Input: TypeAlias = str | Sequence[Mapping[str, Any]] | Sequence[int] | NDArray[np.integer[Any]]


def input_rows(
    inputs: Iterable[Input],
    row_ids: Iterable[str] | None = None,
    metadata: Iterable[Mapping[str, Any]] | None = None,
) -> list[InputRow]:
    """Make rows of prompts, conversations and token ids.

    Args:
        inputs: Each a string, a list of messages, or token ids (a list or an integer array).
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
    contents = [_content(number, value) for number, value in enumerate(inputs)]
    ids = _per_input("row_ids", row_ids, len(contents))
    ids = ids or [f"row-{number:06d}" for number in range(len(contents))]
    extra = _per_input("metadata", metadata, len(contents)) or [{}] * len(contents)
    return parse_objects(
        {"id": row_id, "metadata": _plain("metadata", number, value), **content}
        for number, (row_id, value, content) in enumerate(zip(ids, extra, contents, strict=True))
    )


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
