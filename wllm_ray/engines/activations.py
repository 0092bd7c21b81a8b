"""What an engine in this process answers: activations with the rows that they belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from wllm_ray.dataset.reading.reader import FailedRow
from wllm_ray.digest import parse_json
from wllm_ray.errors import CaptureError, InvalidInputError, NotOfferedError
from wllm_ray.records import CapturedChunk, EngineDescription, RowFailure, RowRecord
from wllm_ray.requests import Selection
from wllm_ray.sites import HookSite, parse_site

__all__ = ["Activations", "AlignedRows", "put_together"]


@dataclass(frozen=True, slots=True, eq=False)
class AlignedRows:
    """Good rows only, in the order of the inputs; ``failures`` holds the rest.

    The same names mean the same as in a loaded dataset. Row *i* has the feature rows
    ``offsets[i]:offsets[i + 1]``; with one feature row per row, which ``last_prompt`` gives,
    features are aligned with ``row_ids``.

    Attributes:
        row_ids: Ids of the good rows.
        metadata: Their metadata.
        token_ids: The ids that were run, each [T] int32.
        offsets: [rows + 1] int64, in feature rows.
        failures: Row id → why it has no activation, and where it stood among the inputs.
        sites: Canonical names, in the order asked for.
        widths: Width of each site.
        position: Canonical.
        description: The engine that ran them.
    """

    row_ids: list[str]
    metadata: list[dict[str, Any]]
    token_ids: list[NDArray[np.int32]]
    offsets: NDArray[np.int64]
    failures: dict[str, FailedRow]
    sites: tuple[str, ...]
    widths: tuple[int, ...]
    position: str
    description: EngineDescription

    def __len__(self) -> int:
        return len(self.row_ids)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self)} rows, {len(self.failures)} failed, "
            f"{self.offsets[-1]} × {', '.join(self.sites)} at {self.position}, "
            f"{self.description.model.name})"
        )

    @classmethod
    def align(
        cls,
        rows: Sequence[RowRecord],
        lengths: Mapping[int, int],
        failures: Mapping[int, RowFailure],
        selection: Selection,
        *,
        description: EngineDescription,
        **features: Any,
    ) -> Self:
        """Say which feature rows belong to which row.

        Args:
            rows: All rows, ascending; those that could not be run carry their failure.
            lengths: Row index → its feature rows, at least one.
            failures: Row index → why it has none.
            selection: What was asked of every row.
            description: The engine.
            features: What a subclass adds.

        Raises:
            CaptureError: A row came back neither good nor failed, or both.
        """
        failed = {row.index: row.failure for row in rows if row.failure is not None}
        failed |= failures
        good = [row for row in rows if _is_good(row, lengths, failed)]
        return cls(
            row_ids=[row.id for row in good],
            metadata=[parse_json(row.metadata_json) for row in good],
            token_ids=[row.token_ids for row in good if row.token_ids is not None],
            offsets=np.cumsum([0, *(lengths[row.index] for row in good)], dtype=np.int64),
            failures={
                row.id: FailedRow(index=row.index, **failed[row.index].model_dump())
                for row in rows
                if row.index in failed
            },
            sites=selection.identity.sites,
            widths=selection.site_widths,
            position=selection.position,
            description=description,
            **features,
        )

    def number_of(self, site: HookSite | str) -> int:
        """Which of the sites this is, counted from 0, by any accepted spelling of its name.

        Raises:
            InvalidInputError: Not a site, or not one of these (``invalid_site``).
        """
        name = str(site if isinstance(site, HookSite) else parse_site(str(site)))
        if name not in self.sites:
            raise InvalidInputError(
                f"site {name} was not captured; captured: {', '.join(self.sites)}",
                code="invalid_site",
            )
        return self.sites.index(name)

    def expect_one_width(self) -> None:
        """Refuse what one array of all sites cannot hold.

        Raises:
            NotOfferedError: The sites differ in width (``widths_not_representable``).
        """
        if len(set(self.widths)) > 1:
            pairs = zip(self.sites, self.widths, strict=True)
            raise NotOfferedError(
                f"one array holds sites of one width, and "
                f"{', '.join(f'{name} has {width}' for name, width in pairs)}; take them one by "
                f"one, for example .site({self.sites[0]!r})",
                code="widths_not_representable",
            )


def _is_good(
    row: RowRecord, lengths: Mapping[int, int], failures: Mapping[int, RowFailure]
) -> bool:
    if (row.index in lengths) == (row.index in failures):
        failure = failures.get(row.index)
        raise CaptureError(
            f"row {row.index} came back with {lengths.get(row.index, 0)} feature rows and failure "
            f"{failure.code if failure else None}; expected exactly one of the two",
            stage="capture",
        )
    return row.index in lengths


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Activations(AlignedRows):
    """Activations in memory. The arrays belong to the caller.

    Attributes:
        side_by_side: [N, sum(widths)] float32: all sites of a feature row, one after the other.
    """

    side_by_side: NDArray[np.float32]

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
        self.expect_one_width()
        return self.side_by_side.reshape(-1, len(self.sites), self.widths[0])

    def site(self, name: HookSite | str) -> NDArray[np.float32]:
        """One site's [N, width] float32, by any accepted spelling of its name. Not copied.

        Raises:
            InvalidInputError: Not a site, or not one of these (``invalid_site``).
        """
        number = self.number_of(name)
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
    failures: dict[int, RowFailure] = {}
    lengths: dict[int, int] = {}
    for chunk in chunks:
        failures |= chunk.failures
        pairs = zip(chunk.row_index.tolist(), chunk.lengths.tolist(), strict=True)
        lengths |= {index: length for index, length in pairs if length}
    shape = (sum(lengths.values()), sum(selection.site_widths))
    return Activations.align(
        rows,
        lengths,
        failures,
        selection,
        description=description,
        side_by_side=_features(chunks, shape),
    )


def _features(chunks: Sequence[CapturedChunk], shape: tuple[int, int]) -> NDArray[np.float32]:
    """One array of all chunks, which is not copied where there is only one."""
    parts = [chunk.features for chunk in chunks] or [np.empty(shape, np.float32)]
    features = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if features.shape != shape:
        raise CaptureError(
            f"expected features of shape {shape}, found {features.shape}", stage="capture"
        )
    return features
