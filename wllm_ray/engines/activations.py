"""What an engine in this process answers: activations with the rows that they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wllm_ray.dataset.reader import FailedRow
from wllm_ray.digest import parse_json
from wllm_ray.errors import CaptureError, InvalidInputError, NotOfferedError
from wllm_ray.records import CapturedChunk, EngineDescription, RowFailure, RowRecord
from wllm_ray.requests import Selection
from wllm_ray.sites import HookSite, parse_site

__all__ = ["Activations", "put_together"]


@dataclass(frozen=True, slots=True, eq=False)
class Activations:
    """Good rows only, in the order of the inputs; ``failures`` holds the rest.

    The same names mean the same as in a loaded dataset. Row *i* is
    ``features[offsets[i]:offsets[i + 1]]``; with one feature row per row, which ``last_prompt``
    gives, ``features`` is aligned with ``row_ids``. The arrays belong to the caller.

    Attributes:
        row_ids: Ids of the good rows.
        metadata: Their metadata.
        token_ids: The ids that were run, each [T] int32.
        offsets: [rows + 1] int64, in feature rows.
        failures: Row id → why it has no activation, and where it stood among the inputs.
        sites: Canonical names, in the order asked for.
        widths: Width of each site.
        position: Canonical.
        side_by_side: [N, sum(widths)] float32: all sites of a feature row, one after the other.
        description: The engine that ran them.
    """

    row_ids: list[str]
    metadata: list[dict[str, object]]
    token_ids: list[NDArray[np.int32]]
    offsets: NDArray[np.int64]
    failures: dict[str, FailedRow]
    sites: tuple[str, ...]
    widths: tuple[int, ...]
    position: str
    side_by_side: NDArray[np.float32]
    description: EngineDescription

    def __len__(self) -> int:
        return len(self.row_ids)

    def __repr__(self) -> str:
        return (
            f"Activations({len(self)} rows, {len(self.failures)} failed, "
            f"{len(self.side_by_side)} × {', '.join(self.sites)} at {self.position}, "
            f"{self.description.model.name})"
        )

    @property
    def features(self) -> NDArray[np.float32]:
        """[N, D] float32 for one site, else [N, L, D]; N counts feature rows. Not copied.

        Raises:
            NotOfferedError: The sites differ in width (``widths_not_representable``).
        """
        stacked = self.features_3d
        return stacked[:, 0] if len(self.sites) == 1 else stacked

    @property
    def features_3d(self) -> NDArray[np.float32]:
        """[N, L, D] float32 whatever the number of sites; raises as :attr:`features`."""
        if len(set(self.widths)) > 1:
            listed = ", ".join(
                f"{name} has {width}" for name, width in zip(self.sites, self.widths, strict=True)
            )
            raise NotOfferedError(
                f"one array holds sites of one width, and {listed}; take them one by one, for "
                f"example .site({self.sites[0]!r})",
                code="widths_not_representable",
            )
        return self.side_by_side.reshape(-1, len(self.sites), self.widths[0])

    def site(self, name: HookSite | str) -> NDArray[np.float32]:
        """One site's [N, width] float32, by any accepted spelling of its name. Not copied.

        Raises:
            InvalidInputError: Not a site, or not one of these (``invalid_site``).
        """
        wanted = str(name if isinstance(name, HookSite) else parse_site(str(name)))
        if wanted not in self.sites:
            raise InvalidInputError(
                f"site {wanted} was not captured; captured: {', '.join(self.sites)}",
                code="invalid_site",
            )
        number = self.sites.index(wanted)
        start = sum(self.widths[:number])
        return self.side_by_side[:, start : start + self.widths[number]]


def put_together(
    rows: Sequence[RowRecord],
    chunks: Sequence[CapturedChunk],
    selection: Selection,
    description: EngineDescription,
) -> Activations:
    """Align what was captured with the rows that it belongs to.

    Args:
        rows: All rows, ascending; those that could not be run carry their failure.
        chunks: What was captured of the others, in row order.
        selection: What was asked of every row.
        description: The engine.

    Raises:
        CaptureError: A row came back neither good nor failed, or features of another shape.
    """
    failures = {row.index: row.failure for row in rows if row.failure is not None}
    lengths: dict[int, int] = {}
    for chunk in chunks:
        failures |= chunk.failures
        pairs = zip(chunk.row_index.tolist(), chunk.lengths.tolist(), strict=True)
        lengths |= {index: length for index, length in pairs if length}
    good = [row for row in rows if _is_good(row, lengths, failures)]
    return Activations(
        row_ids=[row.id for row in good],
        metadata=[parse_json(row.metadata_json) for row in good],
        token_ids=[row.token_ids for row in good if row.token_ids is not None],
        offsets=np.cumsum([0, *(lengths[row.index] for row in good)], dtype=np.int64),
        failures={
            row.id: FailedRow(index=row.index, **failures[row.index].model_dump())
            for row in rows
            if row.index in failures
        },
        sites=selection.identity.sites,
        widths=selection.site_widths,
        position=selection.position,
        side_by_side=_features(chunks, sum(lengths.values()), sum(selection.site_widths)),
        description=description,
    )


def _is_good(row: RowRecord, lengths: dict[int, int], failures: dict[int, RowFailure]) -> bool:
    if (row.index in lengths) == (row.index in failures):
        failure = failures.get(row.index)
        raise CaptureError(
            f"row {row.index} came back with {lengths.get(row.index, 0)} feature rows and failure "
            f"{failure.code if failure else None}; expected exactly one of the two",
            stage="capture",
        )
    return row.index in lengths


def _features(
    chunks: Sequence[CapturedChunk], feature_rows: int, width: int
) -> NDArray[np.float32]:
    """One array of all chunks, which is not copied where there is only one."""
    parts = [chunk.features for chunk in chunks] or [np.empty((0, width), np.float32)]
    features = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if features.shape != (feature_rows, width):
        raise CaptureError(
            f"expected features of shape {(feature_rows, width)}, found {features.shape}",
            stage="capture",
        )
    return features
