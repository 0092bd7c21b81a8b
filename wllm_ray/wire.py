"""Inline results as bytes: JSON, an Arrow stream or npy; and back.

The server encodes and the client decodes with this one module. The Arrow stream is the form that
loses nothing and costs least: one record batch with a row per input row, whose ``features`` column
is a list with one entry per feature row, the values of all sites side by side as float32 (how many
each site has is ``site_widths``), and the rest of the answer as JSON under the schema metadata key
``wllm_ray.response``.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from wllm_ray.digest import canonical_json, parse_json
from wllm_ray.errors import CaptureError, NotOfferedError
from wllm_ray.records import RowFailure
from wllm_ray.schema import ActivationResponse, RowResult

__all__ = [
    "ARROW_STREAM",
    "JSON",
    "NPY",
    "Inline",
    "decode_arrow",
    "encode_arrow",
    "encode_json",
    "encode_npy",
    "expect_one_width",
]

ARROW_STREAM = "application/vnd.apache.arrow.stream"
NPY = "application/x-npy"
JSON = "application/json"

_RESPONSE_KEY = b"wllm_ray.response"


@dataclass(frozen=True, slots=True)
class Inline:
    """An answer with its features beside it.

    Attributes:
        response: The answer; its ``features`` is None here.
        features: [feature rows, sum(site_widths)] float32, C order, the sites side by side.
    """

    response: ActivationResponse
    features: NDArray[np.float32]

    def site(self, number: int) -> NDArray[np.float32]:
        """[feature rows, width of the site], a view: site ``number`` of those asked for."""
        return self._sites()[number]

    def stacked(self) -> NDArray[np.float32]:
        """[feature rows, sites, hidden], a view.

        Raises:
            NotOfferedError: The sites differ in width (code ``widths_not_representable``).
        """
        widths = self.response.site_widths
        expect_one_width(self.response.sites, widths)
        return self.features.reshape(len(self.features), len(widths), widths[0])

    def nested(self) -> list[list[list[float]]]:
        """[feature row][site][value]; the values read back to the same float32."""
        return [list(row) for row in zip(*(one.tolist() for one in self._sites()), strict=True)]

    def _sites(self) -> list[NDArray[np.float32]]:
        return np.split(self.features, np.cumsum(self.response.site_widths)[:-1], axis=1)


def expect_one_width(sites: Sequence[str], widths: Sequence[int]) -> None:
    """Refuse what one array cannot hold.

    Raises:
        NotOfferedError: The sites differ in width (code ``widths_not_representable``).
    """
    if len(set(widths)) > 1:
        listed = ", ".join(f"{site} has {width}" for site, width in zip(sites, widths, strict=True))
        raise NotOfferedError(
            f"one array holds sites of one width, and these differ: {listed}; ask for "
            f"{ARROW_STREAM} or {JSON}, or for sites of one width",
            code="widths_not_representable",
        )


def encode_json(inline: Inline) -> bytes:
    """The answer as JSON, features as nested lists; floats read back to the same float32."""
    full = inline.response.model_copy(update={"features": inline.nested()})
    return full.model_dump_json().encode()


def encode_npy(inline: Inline) -> bytes:
    """The features alone, [feature rows, sites, hidden] as a ``.npy`` file, in request order.

    Raises:
        NotOfferedError: Some row failed, which an array cannot say
            (code ``failures_not_representable``), or the sites differ in width
            (``widths_not_representable``).
    """
    failed = [row for row in inline.response.rows if row.failure is not None]
    if failed:
        raise NotOfferedError(
            f"{len(failed)} of {len(inline.response.rows)} rows failed, which npy cannot carry; "
            f"ask for {ARROW_STREAM} or {JSON}, or leave these rows out",
            code="failures_not_representable",
            details={"failures": [_failure_entry(row) for row in failed]},
        )
    buffer = io.BytesIO()
    np.save(buffer, inline.stacked(), allow_pickle=False)
    return buffer.getvalue()


def _failure_entry(row: RowResult) -> dict[str, object]:
    assert row.failure is not None
    return {"id": row.id, "index": row.index, **row.failure.model_dump()}


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _feature_column(inline: Inline) -> pa.Array:
    """The features as lists of fixed-size lists, over the array's own memory."""
    count, width = inline.features.shape
    flat = pa.array(np.ascontiguousarray(inline.features).reshape(-1))
    rows = pa.FixedSizeListArray.from_arrays(flat, width)
    lengths = np.array([row.length for row in inline.response.rows], dtype=np.int64)
    assert int(lengths.sum()) == count, "row lengths and feature rows disagree"
    return pa.LargeListArray.from_arrays(pa.array(_offsets(lengths)), rows)


def _plain_columns(rows: list[RowResult]) -> dict[str, pa.Array]:
    return {
        "id": pa.array([row.id for row in rows], pa.string()),
        "index": pa.array([row.index for row in rows], pa.int64()),
        "offset": pa.array([row.offset for row in rows], pa.int64()),
        "length": pa.array([row.length for row in rows], pa.int64()),
        "request_sha256": pa.array([row.request_sha256 for row in rows], pa.string()),
        "token_ids": pa.array([row.token_ids for row in rows], pa.large_list(pa.int32())),
        "token_sha256": pa.array([row.token_sha256 for row in rows], pa.string()),
        "failure": pa.array(
            [
                None if row.failure is None else canonical_json(row.failure.model_dump()).decode()
                for row in rows
            ],
            pa.string(),
        ),
    }


def encode_arrow(inline: Inline) -> bytes:
    """The answer as an Arrow IPC stream, see the module's docstring."""
    columns = _plain_columns(inline.response.rows) | {"features": _feature_column(inline)}
    envelope = inline.response.model_copy(update={"rows": [], "features": None})
    table = pa.table(columns).replace_schema_metadata(
        {_RESPONSE_KEY: envelope.model_dump_json().encode()}
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def decode_arrow(data: bytes) -> Inline:
    """Read what :func:`encode_arrow` wrote, over the bytes' own memory.

    Raises:
        CaptureError: The bytes are something else (code ``protocol_error``).
    """
    try:
        table = pa.ipc.open_stream(data).read_all().combine_chunks()
        envelope = parse_json(table.schema.metadata[_RESPONSE_KEY])
        envelope["rows"] = []
        # JSON has no tuples, so the strict model is read in its own JSON mode.
        response = ActivationResponse.model_validate_json(canonical_json(envelope))
        rows = [_row_result(entry) for entry in table.drop_columns(["features"]).to_pylist()]
        features = _decode_features(table, response)
    except (pa.ArrowException, OSError, LookupError, TypeError, ValueError) as error:
        raise CaptureError(
            f"expected an Arrow stream of activations, found {len(data)} bytes that do not read "
            f"as one ({type(error).__name__}); client and server versions may differ",
            code="protocol_error",
        ) from error
    return Inline(response.model_copy(update={"rows": rows}), features)


def _row_result(entry: dict[str, object]) -> RowResult:
    failure = entry["failure"]
    parsed = RowFailure.model_validate(parse_json(failure)) if isinstance(failure, str) else None
    return RowResult.model_validate({**entry, "failure": parsed})


def _decode_features(table: pa.Table, response: ActivationResponse) -> NDArray[np.float32]:
    column = table.column("features").combine_chunks()
    column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    values = column.values.flatten().to_numpy(zero_copy_only=True)
    return values.reshape(response.shape[0], sum(response.site_widths))  # type: ignore[no-any-return]
