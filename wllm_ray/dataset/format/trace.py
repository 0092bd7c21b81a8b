"""Traces: every site at every token of each good row, beside the features of its shard.

A shard with traces is captured once, whole: what the dataset was asked for is taken out of what
the traces hold, so that both are of the same forward pass. :func:`features_of_traces` is that
step, and ``verify`` repeats it over what is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from wllm_ray.dataset.format.arrow import read_batch
from wllm_ray.dataset.format.dtypes import all_finite
from wllm_ray.dataset.format.features import Parts, values_of
from wllm_ray.dataset.format.manifest import Asked, TraceSpec
from wllm_ray.dataset.format.rows import ROWS_SCHEMA, RowColumns
from wllm_ray.digest import canonical_json
from wllm_ray.errors import IntegrityError
from wllm_ray.positions import is_reduced, mean_of, resolve
from wllm_ray.records import CapturedChunk, RowFailure

__all__ = ["Trace", "decode_traces", "encode_traces", "features_of_traces", "taken_from_traces"]

_FORMAT = {"format": "wllm_ray.trace", "format_version": "1"}
_COLUMNS = ("row", "id", "token_ids")


class Trace(NamedTuple):
    """What one row did inside the model.

    Attributes:
        token_ids: [T] int32.
        sites: Canonical name → [T, D] float32, one vector for each token.
    """

    token_ids: NDArray[np.int32]
    sites: dict[str, NDArray[np.float32]]

    def __repr__(self) -> str:
        return f"Trace({len(self.token_ids)} tokens × {len(self.sites)} sites)"


def features_of_traces(
    asked: Asked, values: NDArray[np.float32], lengths: Sequence[int]
) -> NDArray[np.float32]:
    """What a dataset was asked for, out of what its traces hold.

    Args:
        asked: Names sites and position.
        values: [sum(lengths), sum of the trace's widths] float32, rows one after the other.
        lengths: Tokens of each row.

    Returns:
        [feature rows, sum of the asked sites' widths] float32.
    """
    columns = _columns(asked)
    rows = [(end - n, end) for n, end in zip(lengths, accumulate(lengths), strict=True)]
    if is_reduced(asked.position):
        parts = [mean_of(values[start:end, columns]) for start, end in rows]
        return np.concatenate([values[:0, columns], *parts])
    places = [start + resolve(asked.position, end - start) for start, end in rows]
    wanted = np.concatenate([np.empty(0, np.int64), *places])
    features: NDArray[np.float32] = values[np.ix_(wanted, columns)]
    return features


def taken_from_traces(asked: Asked, chunk: CapturedChunk) -> CapturedChunk:
    """The chunk that an engine would have returned for what the dataset was asked for.

    Raises:
        IntegrityError: The chunk does not hold what the traces need (``array_invalid``).
    """
    trace = _trace_of(asked)
    lengths = chunk.lengths.tolist()
    if chunk.widths != trace.site_widths or chunk.features.shape != (
        sum(lengths),
        sum(trace.site_widths),
    ):
        raise IntegrityError(
            f"expected traces of {len(trace.sites)} sites at every token, together "
            f"{sum(trace.site_widths)} wide, found an array of shape {chunk.features.shape} with "
            f"{len(chunk.widths)} sites",
            code="array_invalid",
            stage="stage_shard",
        )
    failures = _not_finite(trace, chunk)
    kept = [0 if row in failures else n for row, n in _tokens(chunk)]
    values = chunk.features
    if failures:
        values = values[np.repeat([n > 0 for n in kept], lengths)]
    features = features_of_traces(asked, values, [n for n in kept if n])
    each = [len(resolve(asked.position, n)) if n else 0 for n in kept]
    if is_reduced(asked.position):
        each = [int(n > 0) for n in kept]
    return replace(
        chunk,
        features=features,
        lengths=np.array(each, np.int64),
        widths=asked.site_widths,
        failures=chunk.failures | failures,
    )


def _tokens(chunk: CapturedChunk) -> list[tuple[int, int]]:
    """(row index, how many tokens of it were captured) of each row of a chunk."""
    return list(zip(chunk.row_index.tolist(), chunk.lengths.tolist(), strict=True))


def _not_finite(trace: TraceSpec, chunk: CapturedChunk) -> dict[int, RowFailure]:
    """Row index → why its trace must not be stored, though what was asked for may be fine."""
    if all_finite(chunk.features, "float32"):
        return {}
    ends = np.cumsum(trace.site_widths)
    failures, start = {}, 0
    for row, count in _tokens(chunk):
        wrong = ~np.isfinite(chunk.features[start : start + count])
        start += count
        if wrong.any():
            token, column = np.argwhere(wrong)[0].tolist()
            site = trace.sites[int(ends.searchsorted(column, side="right"))]
            failures[row] = RowFailure.of(
                "non_finite", f"its trace holds NaN or infinity, first at {site}, token {token}"
            )
    return failures


def encode_traces(
    asked: Asked, rows: RowColumns, values: Sequence[NDArray[np.float32]]
) -> list[Any]:
    """A traces file, in parts to be written one after the other.

    Args:
        asked: Names the traces' sites.
        rows: The rows of the shard.
        values: For each good one, [T, sum of the trace's widths] float32.
    """
    schema = _schema(asked)
    lengths = [len(one) for one in values]
    offsets = pa.array(np.cumsum([0, *lengths]), pa.int64())
    good = np.flatnonzero(rows.is_good)
    known = (rows.token_ids[place] for place in good.tolist())
    ids = [np.empty(0, np.int32), *(one for one in known if one is not None)]
    columns = [
        pa.array(rows.first_row + good, pa.int64()),
        pa.array([rows.ids[place] for place in good], pa.large_string()),
        _lists(offsets, pa.array(np.concatenate(ids), pa.int32()), schema.field("token_ids").type),
    ]
    for name, part in zip(_trace_of(asked).sites, _parts(asked), strict=True):
        column = schema.field(name).type
        block = np.concatenate(
            [np.empty((0, part.stop - part.start), np.float32)] + [one[:, part] for one in values]
        )
        flat = pa.array(block.reshape(-1), pa.float32())
        vectors = pa.FixedSizeListArray.from_arrays(flat, type=column.value_type)
        columns.append(_lists(offsets, vectors, column))
    sink = Parts()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch(columns, schema=schema))
    return [memoryview(part) for part in sink.parts]


def decode_traces(asked: Asked, data: Any, good: pa.RecordBatch, name: str) -> list[Trace]:
    """The traces of a shard, one for each of its good rows, as views of the file.

    Args:
        asked: Names the traces' sites.
        data: The file: bytes or a memory map.
        good: The good rows of the shard's rows table.
        name: The file, for the message.

    Raises:
        IntegrityError: Not an Arrow file of exactly this schema (``table_invalid``), or one of
            other rows or tokens (``rows_inconsistent``).
    """
    batch = read_batch(data, _schema(asked), name, code="table_invalid")
    for column in _COLUMNS:
        if not batch.column(column).equals(good.column(column)):
            raise IntegrityError(
                f"{name}: its column {column} is not that of the shard's good rows; the traces "
                f"belong to other rows, restore the file from a copy",
                code="rows_inconsistent",
            )
    tokens = batch.column("token_ids")
    ids, offsets = tokens.values.to_numpy(), tokens.offsets.to_numpy()
    sites = {site: _site(batch, site, offsets, name) for site in _trace_of(asked).sites}
    return [
        Trace(ids[start:stop], {site: values[start:stop] for site, values in sites.items()})
        for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    ]


def side_by_side(trace: Trace) -> NDArray[np.float32]:
    """[T, sum of the widths] float32: a row's sites beside each other, as captured."""
    return np.concatenate(list(trace.sites.values()), axis=1)


def _trace_of(asked: Asked) -> TraceSpec:
    assert asked.trace is not None, "only datasets with traces come here"
    return asked.trace


def _parts(asked: Asked) -> Iterator[slice]:
    """Where each traced site stands in a captured row of them all."""
    widths = _trace_of(asked).site_widths
    return (slice(end - n, end) for end, n in zip(accumulate(widths), widths, strict=True))


def _columns(asked: Asked) -> NDArray[np.int64]:
    """Which columns of the traces are the asked sites', in the order asked."""
    where = dict(zip(_trace_of(asked).sites, _parts(asked), strict=True))
    return np.concatenate([np.arange(where[s].start, where[s].stop) for s in asked.sites])


def _schema(asked: Asked) -> pa.Schema:
    trace = _trace_of(asked)
    fields = [pa.field(name, ROWS_SCHEMA.field(name).type, nullable=False) for name in _COLUMNS]
    for site, width in zip(trace.sites, trace.site_widths, strict=True):
        vector = pa.list_(pa.field("item", pa.float32(), nullable=False), width)
        several = pa.large_list(pa.field("item", vector, nullable=False))
        fields.append(pa.field(site, several, nullable=False))
    return pa.schema(fields, metadata=_FORMAT | {"sites": canonical_json(trace.sites).decode()})


def _lists(offsets: pa.Array, values: pa.Array, column: pa.DataType) -> pa.Array:
    return pa.LargeListArray.from_arrays(offsets, values, type=column)


def _site(
    batch: pa.RecordBatch, site: str, offsets: NDArray[np.int64], name: str
) -> NDArray[np.float32]:
    """[tokens of all rows, D] float32, proven to be whole."""
    column = batch.column(site)
    values = values_of(column.values)
    same = np.array_equal(column.offsets.to_numpy(), offsets)
    if values is None or column.null_count or not same or not np.isfinite(values).all():
        raise IntegrityError(
            f"{name}: {site} does not hold one finite vector for each token of each good row; "
            f"do not use these traces",
            code="rows_inconsistent",
        )
    return values.reshape(len(column.values), column.type.value_type.list_size)
