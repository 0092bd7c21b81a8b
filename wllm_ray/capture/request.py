"""What can be captured: a task and its rows are checked before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from wllm_ray.capture.coverage import RowsWanted
from wllm_ray.errors import InvalidInputError, NotOfferedError
from wllm_ray.records import CaptureTask, RowFailure, TokenRow

__all__ = ["POSITIONS", "SITE_KINDS", "ModelLimits", "check_rows", "check_task"]

SITE_KINDS = ("resid_post",)
POSITIONS = ("last_prompt",)


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What bounds a request.

    Attributes:
        num_layers: Decoder blocks.
        vocab_size: Rows of the embedding.
        max_model_len: Tokens of the longest prompt.
    """

    num_layers: int
    vocab_size: int
    max_model_len: int


def check_task(task: CaptureTask, limits: ModelLimits) -> tuple[int, ...]:
    """Check sites, position and row order; return the wanted layers in the order asked for.

    Raises:
        InvalidInputError: No site, a site listed twice, a layer that the model does not have, or
            row indices that do not ascend.
        NotOfferedError: A site kind or a position that is not captured.
    """
    if not task.sites:
        raise InvalidInputError("the task names no hook site", code="invalid_site")
    if len(set(task.sites)) != len(task.sites):
        raise InvalidInputError(
            f"a hook site is listed twice: {', '.join(map(str, task.sites))}", code="invalid_site"
        )
    if task.position not in POSITIONS:
        raise NotOfferedError(
            f"position {task.position!r} is not captured; offered: {', '.join(POSITIONS)}",
            code="position_not_offered",
        )
    indices = [row.index for row in task.rows]
    if any(after <= before for before, after in pairwise(indices)):
        raise InvalidInputError(
            f"row indices must ascend, found {indices}", code="invalid_argument"
        )
    return tuple(_layer(task, site_number, limits) for site_number in range(len(task.sites)))


def _layer(task: CaptureTask, site_number: int, limits: ModelLimits) -> int:
    site = task.sites[site_number]
    if site.kind not in SITE_KINDS or site.layer is None:
        raise NotOfferedError(
            f"hook site {site} is not captured; offered kinds: {', '.join(SITE_KINDS)}",
            code="site_not_offered",
        )
    if site.layer >= limits.num_layers:
        raise InvalidInputError(
            f"hook site {site} does not exist: the model has {limits.num_layers} blocks, numbered "
            f"0 to {limits.num_layers - 1}",
            code="layer_out_of_range",
        )
    return site.layer


def check_rows(
    task: CaptureTask, limits: ModelLimits
) -> tuple[list[RowsWanted], dict[int, RowFailure]]:
    """Sort the rows into those that can run, with the positions wanted, and those that cannot."""
    good: list[RowsWanted] = []
    failures: dict[int, RowFailure] = {}
    for row in task.rows:
        failure = _failure(row, limits)
        if failure is None:
            last = np.array([len(row.token_ids) - 1], dtype=np.int64)
            good.append(RowsWanted(row.index, row.token_ids, last))
        else:
            failures[row.index] = failure
    return good, failures


def _failure(row: TokenRow, limits: ModelLimits) -> RowFailure | None:
    length = len(row.token_ids)
    if length == 0:
        return RowFailure.of("zero_tokens", "the row has no token")
    if length > limits.max_model_len:
        return RowFailure.of(
            "too_long",
            f"the row has {length} tokens, the model takes {limits.max_model_len}; nothing is "
            "truncated silently",
        )
    outside = np.flatnonzero((row.token_ids < 0) | (row.token_ids >= limits.vocab_size))
    if len(outside):
        at = int(outside[0])
        return RowFailure.of(
            "token_out_of_vocabulary",
            f"token id {row.token_ids[at]} at position {at} is outside the embedding "
            f"(0 to {limits.vocab_size - 1})",
        )
    return None
