"""Canonical JSON and the digests that are made over it.

FORMAT.md (beside the dataset code) defines each of these with golden values; this module is where
they are computed, once, for the server, the client and the reader.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from json.encoder import encode_basestring as _text
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wllm_ray.errors import InvalidInputError

__all__ = [
    "canonical_json",
    "canonical_text",
    "joined_request_digest",
    "parse_json",
    "request_digest",
    "requests_digest",
    "rows_digest",
    "sha256_hex",
    "token_digest",
    "token_digests",
]

# Python refuses to convert longer decimal texts with int() and str() in one step.
_PLAIN_INT_DIGITS = 4000
# No metadata that is accepted has room for more.
_MAX_INT_DIGITS = 65_536
_SHOWN_CHARACTERS = 80
# Half of a pair has no form in UTF-8; it can occur inside of strings only.
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_TOKEN_ID = np.dtype("<u4")
# Its bytes are the same, whatever the sign.
_INT32 = np.dtype("<i4")
_INTEGERS_ONLY = frozenset({int})


def _escape(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


def _integer_text(value: int) -> str:
    if value < 0:
        return "-" + _integer_text(-value)
    if value.bit_length() < 3 * _PLAIN_INT_DIGITS:
        return int.__repr__(value)
    half = int(value.bit_length() * math.log10(2)) // 2
    high, low = divmod(value, 10**half)
    return _integer_text(high) + _integer_text(low).zfill(half)


def _integer(text: str) -> int:
    """Read a decimal integer by halves, since the time of int() grows with the square."""
    if len(text) < _PLAIN_INT_DIGITS:
        return int(text)
    if len(text) > _MAX_INT_DIGITS:
        raise InvalidInputError(
            f"an integer of {len(text)} digits; at most {_MAX_INT_DIGITS} are read",
            code="invalid_json",
        )
    if text.startswith("-"):
        return -_integer(text[1:])
    half = len(text) // 2
    scale: int = 10**half
    return _integer(text[:-half]) * scale + _integer(text[-half:])


def _float_text(value: float) -> str:
    if not math.isfinite(value):
        raise InvalidInputError(
            "NaN and Infinity have no JSON form; use null or a string", code="invalid_json"
        )
    return float.__repr__(value)


def _object_text(value: Mapping[str, Any]) -> str:
    members = []
    for key in sorted(value):
        member = value[key]
        # Not asked of a table: most members of most rows are texts.
        text = _text(member) if type(member) is str else _encode(member)
        members.append(f"{_text(key)}:{text}")
    return "{" + ",".join(members) + "}"


def _array_text(values: Sequence[Any]) -> str:
    if _INTEGERS_ONLY.issuperset(map(type, values)):  # thousands of token ids, for example
        with suppress(ValueError):  # one is too long to be written in one step
            return f"[{','.join(map(int.__repr__, values))}]"
    return f"[{','.join(map(_encode, values))}]"


_WRITERS: dict[Any, Callable[[Any], str]] = {
    type(None): lambda _: "null",
    bool: lambda value: "true" if value else "false",
    str: _text,
    int: _integer_text,
    float: _float_text,
    dict: _object_text,
    list: _array_text,
    tuple: _array_text,
    Mapping: _object_text,
}


def _encode(value: Any) -> str:
    writer = _WRITERS.get(type(value)) or _writer_of_base(value)
    return writer(value)


def _writer_of_base(value: Any) -> Callable[[Any], str]:
    """For an instance of a subclass."""
    for base, writer in _WRITERS.items():
        if isinstance(value, base):
            return writer
    raise TypeError(f"{type(value).__name__} has no canonical JSON form")


def canonical_json(value: Any) -> bytes:
    r"""The one byte sequence that stands for a JSON value.

    UTF-8 without blanks; object keys sorted by code point; strings raw except for ``"``, ``\\``,
    control characters and lone surrogates, which are escaped; integers in decimal, of any size;
    floats as the shortest decimal that reads back to the same double, in Python's ``repr`` form,
    so ``1`` and ``1.0`` stay apart. RFC 8785 would merge them and refuse large integers, which
    is why it is not used.

    Raises:
        InvalidInputError: The value holds NaN or infinity (code ``invalid_json``).
        TypeError: The value holds something that is not JSON.
    """
    return canonical_text(value).encode()


def canonical_text(value: Any) -> str:
    """As :func:`canonical_json`, before it is encoded."""
    return _escaped(_unescaped_text(value))


def _unescaped_text(value: Any) -> str:
    """As :func:`canonical_text`, in which lone surrogates stand as they are."""
    try:
        return _encode(value)
    except RecursionError:
        raise InvalidInputError("the value is nested too deeply", code="invalid_json") from None


def _escaped(text: str) -> str:
    return text if text.isascii() else _LONE_SURROGATE.sub(_escape, text)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise InvalidInputError(f"key {_shown(twice)} occurs twice", code="invalid_json")
    return result


def _shown(key: str) -> str:
    """A caller's key in a message, at a length that one can read."""
    return f"{key[:_SHOWN_CHARACTERS]!a}" + ("…" if len(key) > _SHOWN_CHARACTERS else "")


def _no_constant(text: str) -> Any:
    raise InvalidInputError(f"{text} is not JSON; use null or a string", code="invalid_json")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise InvalidInputError("a number does not fit a 64-bit float", code="invalid_json")
    return value


_HOOKS: dict[str, Any] = {
    "object_pairs_hook": _unique_keys,
    "parse_constant": _no_constant,
    "parse_float": _finite,
}
# Of a text in which no integer can be long.
_SHORT_DECODER = json.JSONDecoder(**_HOOKS)
_DECODER = json.JSONDecoder(**_HOOKS, parse_int=_integer)


def _decoded(text: str) -> Any:
    if text.startswith("\ufeff"):
        raise json.JSONDecodeError("a byte order mark (BOM)", text, 0)
    decoder = _SHORT_DECODER if len(text) < _PLAIN_INT_DIGITS else _DECODER
    # Most texts begin and end with their value, and looking for blanks takes as long as reading it.
    try:
        value, end = decoder.raw_decode(text)
    except json.JSONDecodeError:
        return decoder.decode(text)
    return value if end == len(text) else decoder.decode(text)


def parse_json(data: bytes | str) -> Any:
    """Parse strict JSON: UTF-8, no duplicate keys, no NaN, no Infinity.

    Integers keep all their digits, up to the 65,536 that the largest metadata could hold.

    Raises:
        InvalidInputError: The data are not strict JSON (code ``invalid_json``). The message never
            quotes the text.
    """
    try:
        text = data if isinstance(data, str) else bytes(data).decode()
        return _decoded(text)
    except UnicodeDecodeError as error:
        raise InvalidInputError(
            f"not UTF-8: byte {error.start} cannot be decoded ({error.reason})",
            code="invalid_json",
        ) from None
    except json.JSONDecodeError as error:
        raise InvalidInputError(
            f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}",
            code="invalid_json",
        ) from None
    except RecursionError:
        raise InvalidInputError("not JSON: nested too deeply", code="invalid_json") from None


def sha256_hex(data: bytes | bytearray | memoryview) -> str:
    """SHA-256 as 64 lowercase hex digits."""
    return hashlib.sha256(data).hexdigest()


def request_digest(
    *, row_id: str, content: Mapping[str, Any], metadata: Mapping[str, Any], identity: Any
) -> str:
    """SHA-256 over one row's identity.

    Args:
        row_id: The row's id.
        content: Exactly one of ``{"prompt": …}``, ``{"messages": …}``, ``{"token_ids": …}``.
        metadata: The row's metadata.
        identity: What the whole request has in common: model and tokenizer revisions, sites,
            position, capture mode and options, as JSON.
    """
    return joined_request_digest(
        row_id, content, canonical_text(metadata), canonical_text(identity)
    )


def joined_request_digest(
    row_id: str, content: Mapping[str, Any], metadata_json: str, identity_json: str
) -> str:
    """As :func:`request_digest`, of metadata and identity that are canonical JSON already."""
    prompt = content.get("prompt")
    # What most rows have is written down here and not found out of tables.
    plain = f'{{"prompt":{_text(prompt)}}}' if type(prompt) is str and len(content) == 1 else None
    text = (
        f'{{"content":{plain or _unescaped_text(content)},"id":{_text(row_id)},'
        f'"identity":{identity_json},"metadata":{metadata_json}}}'
    )
    return sha256_hex(_escaped(text).encode())


def token_digest(token_ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
    """SHA-256 over the token ids, each as an unsigned 32-bit little-endian integer."""
    if not isinstance(token_ids, np.ndarray) or token_ids.dtype != _INT32:
        token_ids = np.asarray(token_ids, _TOKEN_ID)
    return sha256_hex(np.ascontiguousarray(token_ids).data)


def token_digests(rows: Sequence[NDArray[np.int32] | None]) -> list[str | None]:
    """As :func:`token_digest`, of many rows in less time; None where a row has no ids.

    Args:
        rows: [T] int32 each.
    """
    sha256: Callable[[Any], Any] = hashlib.sha256
    try:
        return [
            None
            if ids is None
            else sha256(ids).hexdigest()
            if ids.dtype == _INT32
            else token_digest(ids)
            for ids in rows
        ]
    except ValueError:  # one of them does not lie in memory as it is read
        return [None if ids is None else token_digest(ids) for ids in rows]


def requests_digest(request_digests: Iterable[str]) -> str:
    """SHA-256 over the raw request digests (32 bytes each) of consecutive rows."""
    return sha256_hex(bytes.fromhex("".join(request_digests)))


def rows_digest(rows: Iterable[tuple[str, str | None, str]]) -> str:
    """SHA-256 over what was asked and run in a shard, row by row.

    Args:
        rows: (request digest, token digest or None, status code) of each row, in row order. The
            status of a good row is ``ok``.
    """
    lines = [
        f'["{request}","{token}",{_text(status)}]\n'
        if token is not None
        else f'["{request}",null,{_text(status)}]\n'
        for request, token, status in rows
    ]
    return sha256_hex("".join(lines).encode())
