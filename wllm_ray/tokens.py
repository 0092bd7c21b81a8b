"""From rows to token ids, or to the reason why a row cannot be run.

``tokenize_rows`` never fails as a whole: a row that is well formed but cannot be run becomes a
:class:`~wllm_ray.records.RowFailure`. Nothing is ever truncated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from wllm_ray.digest import canonical_text, joined_request_digest
from wllm_ray.errors import InvalidInputError
from wllm_ray.positions import position_kind, resolve
from wllm_ray.records import (
    CaptureIdentity,
    InputRow,
    RowFailure,
    RowOutline,
    RowRecord,
    TokenizerIdentity,
)
from wllm_ray.rows import has_lone_surrogate, utf8_bytes

__all__ = [
    "ChatTemplateRefusedError",
    "TokenLimits",
    "Tokenizer",
    "make_records",
    "outlines",
    "tokenize_rows",
    "tokens_bound",
]

# Tokens that no text stands for: those around a prompt, around a message, and what a chat template
# says by itself (some carry a system prompt of their own).
ADDED_TO_PROMPT = 16
ADDED_TO_MESSAGE = 64
ADDED_TO_MESSAGES = 1024


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """What the model takes: tokens per row, and ids below ``vocab_size``."""

    max_model_len: int
    vocab_size: int


class ChatTemplateRefusedError(Exception):
    """The tokenizer's chat template raised; the cause says how."""


class Tokenizer(Protocol):
    """Turns text into ids, the way the model was trained to read it."""

    @property
    def identity(self) -> TokenizerIdentity:
        """Name, revision and template digest."""

    def encode_prompts(self, prompts: Sequence[str]) -> list[list[int]]:
        """Ids of raw prompts, with the tokenizer's default special tokens."""

    def encode_messages(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Ids of a conversation, rendered with a generation prompt.

        Raises:
            ChatTemplateRefusedError: The template raised.
        """


def make_records(
    rows: Iterable[InputRow], identity: CaptureIdentity, first_index: int = 0
) -> Iterator[RowRecord]:
    """Bind consecutive rows, whose token ids are not known here, to the request they are part of.

    Args:
        rows: The rows.
        identity: What the whole request has in common; enters the request digests.
        first_index: Index of the first row among all input rows.
    """
    common = _text_of(identity)
    for index, row in enumerate(rows, start=first_index):
        yield _record(index, row, common)


def outlines(rows: Iterable[InputRow], identity: CaptureIdentity) -> Iterator[RowOutline]:
    """What :func:`make_records` would say of rows, as far as it decides how they are sharded."""
    common = _text_of(identity)
    for row in rows:
        digest = joined_request_digest(row.id, row.content, row.metadata_json, common)
        yield RowOutline(digest, tokens_bound(row.content))


def _text_of(identity: CaptureIdentity) -> str:
    return canonical_text(identity.model_dump())


def _record(
    index: int,
    row: InputRow,
    identity_json: str,
    token_ids: NDArray[np.int32] | None = None,
    failure: RowFailure | None = None,
) -> RowRecord:
    metadata = row.metadata_json
    return RowRecord(
        index,
        row.id,
        metadata,
        joined_request_digest(row.id, row.content, metadata, identity_json),
        tokens_bound(row.content),
        token_ids,
        failure,
    )


def tokens_bound(content: Mapping[str, Any]) -> int:
    """How many tokens a row may have, without a tokenizer; exact for token ids.

    A byte-level tokenizer never makes more tokens than bytes; what it adds around a text, and a
    chat template around messages, is allowed for. The bound serves planning alone: a tokenizer
    that exceeds it makes a shard larger than its limit, nothing else.

    Args:
        content: Exactly one of ``prompt``, ``messages`` and ``token_ids``.
    """
    ((key, value),) = content.items()
    if key == "token_ids":
        return len(value)
    if key == "prompt":
        return _text_bytes(value) + ADDED_TO_PROMPT
    return _text_bytes(value) + ADDED_TO_MESSAGE * len(value) + ADDED_TO_MESSAGES


def _text_bytes(value: Any) -> int:
    """UTF-8 bytes of all strings in a JSON value, the keys of objects left out."""
    if isinstance(value, str):
        return utf8_bytes(value)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return 0
    return sum(map(_text_bytes, value))


def _refusal_before(row: InputRow, tokenizer: Tokenizer) -> RowFailure | None:
    """What can be known to be wrong without running the tokenizer."""
    ((key, value),) = row.content.items()
    if key != "token_ids" and not value:
        return RowFailure.of("empty_prompt", f"`{key}` is empty")
    if key != "token_ids" and has_lone_surrogate(value):
        return RowFailure.of(
            "lone_surrogate", f"`{key}` holds half of a surrogate pair, which UTF-8 cannot carry"
        )
    if key == "messages" and tokenizer.identity.chat_template_sha256 is None:
        return RowFailure.of(
            "no_chat_template",
            "the tokenizer has no chat template; send `prompt` or `token_ids` instead",
        )
    return None


def _refusal_after(
    ids: Sequence[int], limits: TokenLimits, position: str, *, are_known: bool
) -> RowFailure | None:
    """What is wrong with the ids themselves, or with asking for this position of them.

    Args:
        ids: The row's.
        limits: Of the model.
        position: What is asked for.
        are_known: All of them are in the vocabulary, and need not be looked at.
    """
    if not ids:
        return RowFailure.of("zero_tokens", "the row has no tokens; the model needs at least one")
    if len(ids) > limits.max_model_len:
        return RowFailure.of(
            "too_long",
            f"the row has {len(ids)} tokens and the model takes {limits.max_model_len}; "
            "shorten it or serve the model with a larger max_model_len",
        )
    if not are_known and (min(ids) < 0 or max(ids) >= limits.vocab_size):
        return _out_of_vocabulary(ids, limits.vocab_size)
    return _outside(position, len(ids))


def _out_of_vocabulary(ids: Sequence[int], vocab_size: int) -> RowFailure:
    """Names the first id that the model does not have; there is one."""
    place, token = next(
        (place, token) for place, token in enumerate(ids) if not 0 <= token < vocab_size
    )
    shown = token if abs(token) < 10**12 else "a number too large to print"
    return RowFailure.of(
        "token_out_of_vocabulary",
        f"token id {shown} at position {place} is outside 0..{vocab_size - 1}",
    )


def _outside(position: str, tokens: int) -> RowFailure | None:
    """Why a row of this many tokens has no such position; None where it has."""
    if position_kind(position) != "index":
        return None
    try:
        resolve(position, tokens)
    except InvalidInputError as error:
        return RowFailure.of("position_out_of_range", error.message)
    return None


def _encode(rows: Sequence[InputRow], tokenizer: Tokenizer) -> list[list[int] | RowFailure]:
    """Ids of rows that :func:`_refusal_before` let pass; raw prompts in one call for speed."""
    prompts = [row.content["prompt"] for row in rows if "prompt" in row.content]
    encoded = iter(tokenizer.encode_prompts(prompts) if prompts else ())
    results: list[list[int] | RowFailure] = []
    for row in rows:
        if "prompt" in row.content:
            results.append(next(encoded))
        elif "token_ids" in row.content:
            results.append(row.content["token_ids"])
        else:
            results.append(_encode_messages(row.content["messages"], tokenizer))
    return results


def _encode_messages(
    messages: Sequence[dict[str, Any]], tokenizer: Tokenizer
) -> list[int] | RowFailure:
    try:
        return tokenizer.encode_messages(messages)
    except ChatTemplateRefusedError as error:
        # The template's own words may quote the messages, so only the kind of error is kept.
        kind = type(error.__cause__).__name__
        return RowFailure.of(
            "chat_template_error",
            f"the chat template refused the messages ({kind}); check roles and their order",
        )


def tokenize_rows(
    rows: Sequence[InputRow],
    tokenizer: Tokenizer,
    identity: CaptureIdentity,
    limits: TokenLimits,
    *,
    first_index: int = 0,
) -> list[RowRecord]:
    """Turn rows into token ids, or into the reason why one cannot be run. Never truncates.

    Args:
        rows: The rows, in request order.
        tokenizer: The served model's tokenizer.
        identity: What the whole request has in common.
        limits: Length and vocabulary of the model.
        first_index: Index of the first row among all input rows.
    """
    refused = [_refusal_before(row, tokenizer) for row in rows]
    encoded = iter(
        _encode([r for r, no in zip(rows, refused, strict=True) if no is None], tokenizer)
    )
    common = _text_of(identity)
    outcomes = _settled([no or next(encoded) for no in refused], limits, identity.position)
    return [
        _record(index, row, common, tokens, failure)
        for index, (row, (tokens, failure)) in enumerate(
            zip(rows, outcomes, strict=True), start=first_index
        )
    ]


def _settled(
    outcomes: Sequence[list[int] | RowFailure], limits: TokenLimits, position: str
) -> Iterator[tuple[NDArray[np.int32] | None, RowFailure | None]]:
    """For each row ids that can be run, or the reason why there are none.

    Ids of all rows are converted and looked at together: one row after the other, that takes twice
    as long.
    """
    every = _together([one for one in outcomes if not isinstance(one, RowFailure)])
    known = every is not None and (
        not every.size or bool(every.min() >= 0 and every.max() < limits.vocab_size)
    )
    tokens = every.astype(np.int32) if every is not None and known else None
    length_decides = known and position_kind(position) != "index"
    start = 0
    for outcome in outcomes:
        if isinstance(outcome, RowFailure):
            yield None, outcome
            continue
        stop = start + len(outcome)
        failure = None
        if not length_decides or not start < stop <= start + limits.max_model_len:
            failure = _refusal_after(outcome, limits, position, are_known=known)
        if failure is not None:
            yield None, failure
        elif tokens is not None:
            yield tokens[start:stop], None
        else:
            yield np.array(outcome, np.int32), None
        start = stop


def _together(ids: Sequence[list[int]]) -> NDArray[np.int64] | None:
    """Ids of all rows, one row after the other; None where one is larger than any vocabulary."""
    try:
        return np.fromiter(chain.from_iterable(ids), np.int64, sum(map(len, ids)))
    except OverflowError:
        return None
