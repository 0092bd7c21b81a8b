"""Capturing chunks over HTTP, and turning the answers into what ``stage_shard`` takes.

The server tokenises. Its answer says for each row which ids it ran and which request digest it
computed; that digest must be the one computed here, so that both sides mean the same row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wllm_ray.client.connection import Connection
from wllm_ray.digest import canonical_json
from wllm_ray.errors import CaptureError, UnavailableError
from wllm_ray.records import (
    CapturedChunk,
    Chunk,
    EngineDescription,
    InputRow,
    RowRecord,
)
from wllm_ray.requests import Selection
from wllm_ray.schema import ActivationResponse, ExtractionSchema, ModelCard, RowResult
from wllm_ray.wire import ARROW_STREAM, Inline, decode_arrow

__all__ = ["Answer", "Remote", "as_served", "check_answer", "request_bodies"]

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Answer:
    """Rows as sent, and the inline answer to exactly these."""

    rows: tuple[RowRecord, ...]
    inline: Inline


class Remote:
    """Captures chunks on a served model.

    Args:
        connection: The application.
        card: The model, as the application describes it.
        selection: What is captured of every row.
        schema: The application's bounds.

    Attributes:
        card: As given.
    """

    def __init__(
        self,
        connection: Connection,
        card: ModelCard,
        selection: Selection,
        schema: ExtractionSchema,
    ) -> None:
        row_bytes = sum(selection.site_widths) * FLOAT32_BYTES
        self.card = card
        self._connection = connection
        self._selection = selection
        self._max_feature_rows = schema.max_inline_bytes // row_bytes
        self._max_body_bytes = schema.max_body_bytes
        self._request = {
            "model": card.id,
            "sites": list(selection.identity.sites),
            "position": selection.position,
        }

    async def capture(self, chunk: Chunk) -> list[Answer]:
        """Capture a chunk, in as many requests as the application's bounds need.

        Raises:
            UnavailableError: Nobody took a request for as long as the connection is patient
                (``server_unreachable``), or an answer took too long (``deadline_exceeded``).
            WLLMError: What the application said.
        """
        rows = [(row, row.source) for row in chunk.rows if row.source is not None]
        bodies = request_bodies(
            self._request,
            [(row, source, self._at_most(row)) for row, source in rows],
            max_feature_rows=self._max_feature_rows,
            max_bytes=self._max_body_bytes,
        )
        return [await self._ask(part, body) for part, body in bodies]

    def _at_most(self, row: RowRecord) -> int:
        """Feature rows that the answer may hold for a row, which only the server tokenises."""
        return self._selection.feature_rows_at(min(row.tokens_bound, self.card.max_model_len))

    async def _ask(self, rows: tuple[RowRecord, ...], body: bytes) -> Answer:
        try:
            response = await self._connection.post(
                "/v1/activation-datasets", body, accept=ARROW_STREAM
            )
        except UnavailableError as error:
            if error.code == "deadline_exceeded":
                raise
            raise UnavailableError(
                f"{self._connection.address} took no rows for {self._connection.patience_s:g} s; "
                f"the last answer: {error.message}",
                code="server_unreachable",
                stage="capture",
                details=error.details,
            ) from error
        answer = Answer(rows, decode_arrow(response.content))
        check_answer(rows, answer.inline.response, self._selection)
        return answer


def request_bodies(
    request: Mapping[str, object],
    rows: Iterable[tuple[RowRecord, InputRow, int]],
    *,
    max_feature_rows: int,
    max_bytes: int,
) -> Iterator[tuple[tuple[RowRecord, ...], bytes]]:
    """Cut rows into requests that keep both bounds; a row over one of them goes alone.

    Args:
        request: What all bodies have in common.
        rows: Each with what is sent of it and how many feature rows it gives at most.
        max_feature_rows: Bound of one answer.
        max_bytes: Bound of one body.

    Yields:
        (rows, request body).
    """
    head = canonical_json(request)[:-1] + b',"rows":['
    part: list[RowRecord] = []
    texts: list[bytes] = []
    size, expected = len(head) + 2, 0
    for row, source, count in rows:
        text = canonical_json({"id": source.id, "metadata": source.metadata, **source.content})
        if part and (expected + count > max_feature_rows or size + len(text) + 1 > max_bytes):
            yield tuple(part), head + b",".join(texts) + b"]}"
            part, texts, size, expected = [], [], len(head) + 2, 0
        part.append(row)
        texts.append(text)
        size += len(text) + 1
        expected += count
    if part:
        yield tuple(part), head + b",".join(texts) + b"]}"


def check_answer(
    rows: Sequence[RowRecord], response: ActivationResponse, selection: Selection
) -> None:
    """Prove that an answer is about exactly the rows, sites and position that were asked for.

    Raises:
        CaptureError: It is not (``protocol_error``).
    """
    expected = (selection.identity.sites, selection.site_widths, selection.position)
    found = (response.sites, response.site_widths, response.position)
    if found != expected:
        _differs(_described(*expected), _described(*found))
    if len(response.rows) != len(rows):
        _differs(f"{len(rows)} rows", str(len(response.rows)))
    for row, result in zip(rows, response.rows, strict=True):
        _check_result(row, result, selection)


def _check_result(row: RowRecord, result: RowResult, selection: Selection) -> None:
    if result.id != row.id:
        _differs(f"row {row.index} with id {row.id!a}", f"id {result.id!a}")
    if result.request_sha256 != row.request_digest:
        _differs(
            f"row {row.index} with request digest {row.request_digest}",
            f"{result.request_sha256}; the model behind the address may have changed",
        )
    tokens = len(result.token_ids or ())
    wanted = 0 if result.failure else selection.feature_rows_at(tokens)
    if result.length != wanted:
        _differs(
            f"row {row.index} of {tokens} tokens with {wanted} feature rows", str(result.length)
        )


def _described(sites: Sequence[str], widths: Sequence[int], position: str) -> str:
    """What was captured of each row, in words."""
    pairs = zip(sites, widths, strict=False)
    return f"sites {', '.join(f'{site} × {width}' for site, width in pairs)} at {position}"


def _differs(expected: str, found: str) -> None:
    raise CaptureError(
        f"the answer does not match the request: expected {expected}, found {found}",
        code="protocol_error",
        stage="capture",
    )


def as_served(
    rows: Sequence[RowRecord], answers: Sequence[Answer], card: ModelCard
) -> tuple[list[RowRecord], list[CapturedChunk]]:
    """The records and chunks that the server itself would have staged.

    Rows that were refused before they reached an engine carry their failure in the record, and no
    chunk holds them: a shard without any captured row then has no fingerprint, here as there.
    """
    known: dict[int, RowResult] = {}
    for answer in answers:
        pairs = zip(answer.rows, answer.inline.response.rows, strict=True)
        known |= {row.index: result for row, result in pairs}
    records = [_tokenized(row, known.get(row.index)) for row in rows]
    chunks = (_chunk(answer, card) for answer in answers)
    return records, [chunk for chunk in chunks if chunk.row_index.size]


def _tokenized(row: RowRecord, result: RowResult | None) -> RowRecord:
    plain = row._replace(source=None)
    if result is None:
        return plain
    ids = None if result.token_ids is None else np.asarray(result.token_ids, dtype=np.int32)
    return plain._replace(token_ids=ids, failure=result.failure if _was_refused(result) else None)


def _was_refused(result: RowResult) -> bool:
    return result.failure is not None and result.failure.stage == "tokenize"


def _chunk(answer: Answer, card: ModelCard) -> CapturedChunk:
    response = answer.inline.response
    pairs = zip(answer.rows, response.rows, strict=True)
    ran = [(row.index, result) for row, result in pairs if not _was_refused(result)]
    return CapturedChunk(
        row_index=_int64(index for index, _ in ran),
        lengths=_int64(result.length for _, result in ran),
        features=answer.inline.features,
        widths=response.site_widths,
        failures={index: result.failure for index, result in ran if result.failure},
        description=_description(response, card),
        timings=response.timings,
    )


def _int64(values: Iterator[int]) -> NDArray[np.int64]:
    return np.fromiter(values, dtype=np.int64)


def _description(response: ActivationResponse, card: ModelCard) -> EngineDescription:
    asked = card.model_dump(include=set(EngineDescription.model_fields) - {"fingerprint"})
    asked |= {"model": response.model, "tokenizer": response.tokenizer}
    return EngineDescription(
        **asked,
        served_model_name=card.id,
        fingerprint=response.fingerprint,
        versions=response.versions,
        selftest=response.selftest,
    )
