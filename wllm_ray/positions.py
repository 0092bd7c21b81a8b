"""Positions: which tokens of a row are kept.

A position has one canonical text, which is stored and enters request digests: a name, or
``index:0,-1`` for chosen places. :func:`resolve` turns it into absolute token positions of one row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from wllm_ray.errors import InvalidInputError

__all__ = [
    "POSITION_KINDS",
    "PositionLike",
    "canonical_position",
    "feature_rows_of",
    "is_of_tokens",
    "is_reduced",
    "only_last",
    "position_kind",
    "resolve",
]

POSITION_KINDS = (
    "last_prompt",
    "first",
    "all_prompt",
    "mean_prompt",
    "index",
    "all_generated",
    "last_generated",
)
# What a request may hold: a name, ``index:0,-1``, or ``{"index": [0, -1]}``.
PositionLike: TypeAlias = str | Mapping[str, Any]

_ALIASES = {"last-prompt": "last_prompt"}
_ONE_PER_ROW = frozenset({"last_prompt", "first", "mean_prompt", "last_generated"})
_INDEX = re.compile(r"index:(-?(?:0|[1-9][0-9]{0,8})(?:,-?(?:0|[1-9][0-9]{0,8}))*)")
_MAX_INDICES = 4096


def canonical_position(position: PositionLike) -> str:
    """The stored spelling of a position: a name, or ``index:`` and integers.

    Negative integers count from the end; the order asked for is kept.

    Raises:
        InvalidInputError: Not a position (code ``invalid_position``).
    """
    if isinstance(position, Mapping):
        return _canonical_index(position)
    if not isinstance(position, str):
        raise _invalid(position)
    name = _ALIASES.get(position, position)
    if name.startswith("index:"):
        match = _INDEX.fullmatch(name.replace(" ", ""))
        if match is None:
            raise _invalid(position)
        return _joined([int(part) for part in match[1].split(",")], position)
    if name == "index" or name not in POSITION_KINDS:
        raise _invalid(position)
    return name


def position_kind(position: str) -> str:
    """The kind of a canonical position: one of :data:`POSITION_KINDS`."""
    return position.partition(":")[0]


def is_reduced(position: str) -> bool:
    """Whether the captured tokens are reduced to one feature row (``mean_prompt``)."""
    return position == "mean_prompt"


def mean_of(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """[1, D] float32: the mean over [T, D], what ``mean_prompt`` is.

    Added up position by position, in float32: the order is part of the definition. Where the
    positions of one component lie side by side in memory, NumPy would add them in pairs.
    """
    values = np.ascontiguousarray(values)
    if values.shape[1] > 1:
        total = np.add.reduce(values, axis=0, dtype=np.float32)
    else:
        total = np.add.accumulate(values, axis=0, dtype=np.float32)[-1]
    return np.asarray(total / np.float32(len(values)))[None]


def only_last(position: str) -> bool:
    """Whether nothing but the last prompt token is read, whatever the row's length."""
    return position in ("last_prompt", "index:-1")


def is_of_tokens(position: str) -> bool:
    """Whether each feature row is of one prompt token: not of a mean, nor of what was generated."""
    return not is_reduced(position) and "generated" not in position_kind(position)


@lru_cache(maxsize=4096)  # asked several times for every row, and lengths repeat
def feature_rows_of(position: str, tokens: int) -> int | None:
    """Feature rows that a row of this many prompt tokens has; None where it depends on more."""
    kind = position_kind(position)
    if kind in _ONE_PER_ROW:
        return 1
    if kind == "index":
        return len(_indices(position))
    return tokens if kind == "all_prompt" else None


def resolve(position: str, tokens: int) -> NDArray[np.int64]:
    """Absolute positions to read in a prompt of ``tokens`` ids, in the order asked for.

    Two indices may name one token (``index:0,-1`` of a one-token prompt): it is then listed twice.

    Args:
        position: Canonical, one of the prompt positions.
        tokens: Length of the prompt, at least 1.

    Returns:
        [P] int64. For ``mean_prompt`` all of them: what is read, before it is reduced.

    Raises:
        InvalidInputError: An index outside the prompt (code ``position_out_of_range``), or a
            position of generated tokens (``invalid_position``).
    """
    kind = position_kind(position)
    if kind == "last_prompt":
        return np.array([tokens - 1], dtype=np.int64)
    if kind == "first":
        return np.array([0], dtype=np.int64)
    if kind in ("all_prompt", "mean_prompt"):
        return np.arange(tokens, dtype=np.int64)
    if kind != "index":
        raise _invalid(position)
    wanted = np.array(_indices(position), dtype=np.int64)
    outside = wanted[(wanted < -tokens) | (wanted >= tokens)]
    if len(outside):
        raise InvalidInputError(
            f"index {outside[0]} is outside a row of {tokens} tokens "
            f"({-tokens} to {tokens - 1} would do)",
            code="position_out_of_range",
        )
    return np.where(wanted < 0, wanted + tokens, wanted)


def _canonical_index(position: Mapping[str, Any]) -> str:
    found = position.get("index")
    if set(position) != {"index"} or not isinstance(found, (list, tuple)) or not found:
        raise _invalid(position)
    if any(isinstance(one, bool) or not isinstance(one, int) for one in found):
        raise _invalid(position)
    if any(abs(one) > 999_999_999 for one in found):  # noqa: PLR2004 (as in _INDEX)
        raise _invalid(position)
    return _joined(list(found), position)


def _joined(indices: list[int], found: object) -> str:
    if len(set(indices)) != len(indices) or len(indices) > _MAX_INDICES:
        raise InvalidInputError(
            f"position {_shown(found)}: list each index once, at most {_MAX_INDICES} of them",
            code="invalid_position",
        )
    return "index:" + ",".join(map(str, indices))


def _indices(position: str) -> list[int]:
    return [int(part) for part in position.partition(":")[2].split(",")]


def _shown(found: object) -> str:
    return ascii(found)[:100]


def _invalid(found: object) -> InvalidInputError:
    names = [kind for kind in POSITION_KINDS if kind != "index" and "generated" not in kind]
    near = [name for name in names if isinstance(found, str) and found and found in name]
    meant = f", did you mean {near[0]}?" if near else "."
    return InvalidInputError(
        f"cannot read position {_shown(found)}{meant} Write one of {', '.join(names)}, or "
        'index:0,-1 for chosen tokens, which in JSON is also {"index": [0, -1]}',
        code="invalid_position",
    )
