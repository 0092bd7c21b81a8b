"""What can be captured: a task and its rows are checked before anything runs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from wllm_ray.capture.coverage import ChunkCapture, RowsWanted, SitesWanted
from wllm_ray.capture.reading import Reading
from wllm_ray.errors import InvalidInputError, NotOfferedError
from wllm_ray.offered import site_widths
from wllm_ray.positions import canonical_position, is_reduced, only_last, position_kind, resolve
from wllm_ray.records import (
    CapturedChunk,
    CaptureTask,
    EngineDescription,
    RowFailure,
    SiteSupport,
    TokenRow,
)
from wllm_ray.sites import SITE_KINDS, HookSite

__all__ = ["POSITIONS", "check_rows", "check_task", "chunk_of", "support_of"]

POSITIONS = ("last_prompt", "first", "all_prompt", "mean_prompt", "index")


def support_of(readings: dict[HookSite, Reading]) -> tuple[SiteSupport, ...]:
    """What to tell of the sites that can be read: kinds, layers and widths."""
    layers: dict[tuple[str, int], list[int]] = {}
    for site, reading in readings.items():
        found = layers.setdefault((site.kind, reading.width), [])
        if site.layer is not None:
            found.append(site.layer)
    ordered = sorted(layers.items(), key=lambda item: SITE_KINDS.index(item[0][0]))
    return tuple(
        SiteSupport(kind=kind, layers=tuple(of_kind) or None, width=width)
        for (kind, width), of_kind in ordered
    )


def check_task(
    task: CaptureTask, served: EngineDescription, readings: dict[HookSite, Reading]
) -> SitesWanted:
    """Check sites, position and row order; return what is read in every row.

    Raises:
        InvalidInputError: No site, a site listed twice, a layer that the model does not have, a
            position that cannot be read, or row indices that do not ascend.
        NotOfferedError: A site or a position that is not captured here.
    """
    if not task.sites:
        raise InvalidInputError("the task names no hook site", code="invalid_site")
    if len(set(task.sites)) != len(task.sites):
        raise InvalidInputError(
            f"a hook site is listed twice: {', '.join(map(str, task.sites))}", code="invalid_site"
        )
    position = canonical_position(task.position)
    if position_kind(position) not in POSITIONS:
        raise NotOfferedError(
            f"position {position!r} is not captured; offered: {', '.join(POSITIONS)}",
            code="position_not_offered",
        )
    indices = [row.index for row in task.rows]
    if any(after <= before for before, after in pairwise(indices)):
        raise InvalidInputError(
            f"row indices must ascend, found {indices}", code="invalid_argument"
        )
    return SitesWanted(
        sites=task.sites,
        widths=site_widths(served, task.sites),
        depth=max(readings[site].depth for site in task.sites),
        mean=is_reduced(position),
        last_only=only_last(position),
    )


def check_rows(
    task: CaptureTask, served: EngineDescription
) -> tuple[list[RowsWanted], dict[int, RowFailure]]:
    """Sort the rows into those that can run, with the positions wanted, and those that cannot."""
    position = canonical_position(task.position)
    good: list[RowsWanted] = []
    failures: dict[int, RowFailure] = {}
    for row in task.rows:
        found = _failure(row, served) or _wanted(row, position)
        if isinstance(found, RowFailure):
            failures[row.index] = found
        else:
            good.append(found)
    return good, failures


def chunk_of(
    task: CaptureTask,
    capture: ChunkCapture,
    failures: dict[int, RowFailure],
    *,
    description: EngineDescription,
    timings: dict[str, float],
) -> CapturedChunk:
    """The answer to a task, from buffers that have been proven.

    Args:
        task: What was asked.
        capture: Its buffers.
        failures: Row index → why the row was not run.
        description: The engine that ran it.
        timings: Seconds by phase.
    """
    bad = {row.wanted.index: row.failure for row in capture.rows if row.failure is not None}
    lengths = {
        row.wanted.index: capture.feature_rows(row) for row in capture.rows if row.failure is None
    }
    return CapturedChunk(
        row_index=np.array([row.index for row in task.rows], dtype=np.int64),
        lengths=np.array([lengths.get(row.index, 0) for row in task.rows], dtype=np.int64),
        features=capture.good_rows(),
        widths=capture.wanted.widths,
        failures=failures | bad,
        description=description,
        timings=timings,
        recaptured=capture.recaptured,
    )


def _wanted(row: TokenRow, position: str) -> RowsWanted | RowFailure:
    try:
        asked = resolve(position, len(row.token_ids))
    except InvalidInputError as error:
        return RowFailure.of("position_out_of_range", error.message)
    ascending, order = np.unique(asked, return_inverse=True)
    as_is = np.array_equal(asked, ascending)
    return RowsWanted(row.index, row.token_ids, ascending, None if as_is else order)


def _failure(row: TokenRow, served: EngineDescription) -> RowFailure | None:
    length = len(row.token_ids)
    if length == 0:
        return RowFailure.of("zero_tokens", "the row has no token")
    if length > served.max_model_len:
        return RowFailure.of(
            "too_long",
            f"the row has {length} tokens, the model takes {served.max_model_len}; nothing is "
            "truncated silently",
        )
    outside = np.flatnonzero((row.token_ids < 0) | (row.token_ids >= served.vocab_size))
    if len(outside):
        at = int(outside[0])
        return RowFailure.of(
            "token_out_of_vocabulary",
            f"token id {row.token_ids[at]} at position {at} is outside the embedding "
            f"(0 to {served.vocab_size - 1})",
        )
    return None
