"""Load a committed dataset: NumPy and Arrow on a CPU, no model, no GPU, no Ray.

::

    dataset = load_dataset("root", "my-dataset")  # or its folder, "root/datasets/my-dataset"
    dataset.features      # [N, D] float32, memory-mapped
    dataset.row_ids[0], dataset.metadata[0], dataset.token_ids[0]
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from wllm_ray.dataset import verify as verification
from wllm_ray.dataset.batches import Batch, iter_batches, pick, whole, writable
from wllm_ray.dataset.files import DatasetFiles, Verify, open_manifest
from wllm_ray.dataset.layout import split_dataset_path
from wllm_ray.dataset.manifest import Manifest
from wllm_ray.dataset.rowtable import good_rows, token_arrays
from wllm_ray.dataset.shard import read_failure
from wllm_ray.dataset.sitenames import site_number
from wllm_ray.dataset.store import Root, open_store
from wllm_ray.dataset.table import features_table
from wllm_ray.digest import parse_json
from wllm_ray.errors import IntegrityError, InvalidInputError
from wllm_ray.records import RowFailure
from wllm_ray.sites import HookSite

if TYPE_CHECKING:
    import torch

__all__ = ["ActivationDataset", "FailedRow", "load_dataset"]

_LISTED = 5


class FailedRow(RowFailure):
    """Why a row has no activation, and its index among all input rows."""

    index: int


def load_dataset(
    root_or_uri: Root, dataset_id: str | None = None, *, verify: Verify = "lazy"
) -> ActivationDataset:
    """Open a committed dataset; touches no feature byte unless ``verify="full"``.

    Args:
        root_or_uri: The storage root: a local path, ``s3://…``, ``gs://…``, ``az://…``,
            ``memory://…``, or an open store. Alone, a dataset's own folder or address,
            ``ROOT/datasets/DATASET_ID``.
        dataset_id: The dataset's id.
        verify: ``lazy`` checks manifest, names and sizes now, and a shard's digest and finiteness
            once, at first access; ``full`` checks everything now; ``off`` skips digests and
            finiteness.

    Raises:
        NotFoundError: It is not committed here (``dataset_not_found``).
        IntegrityError: Something is not what its record says; the code says what.
        InvalidInputError: An id, a root or a ``verify`` that cannot be (``invalid_argument``).
    """
    if verify not in ("lazy", "full", "off"):
        raise InvalidInputError(
            f"verify is 'lazy', 'full' or 'off', found {verify!r}", code="invalid_argument"
        )
    root, dataset_id = _located(root_or_uri, dataset_id)
    store = open_store(root)
    files = DatasetFiles(store, open_manifest(store, dataset_id), verify)
    files.check_sizes()
    if verify == "full":
        verification.verify_files(files).raise_first()
    return ActivationDataset(files)


def _located(root: Root, dataset_id: str | None) -> tuple[Root, str]:
    if dataset_id is not None:
        return root, dataset_id
    is_path = isinstance(root, (str, os.PathLike))
    given = os.fspath(root) if isinstance(root, (str, os.PathLike)) else root.uri
    found = split_dataset_path(given) if is_path else None
    if found is None:
        raise InvalidInputError(
            f"expected load_dataset(ROOT, DATASET_ID), or the path ROOT/datasets/DATASET_ID alone; "
            f"found {given!a} alone",
            code="invalid_argument",
        )
    return found


class ActivationDataset:
    """A committed dataset. Good rows only, in request order; ``failures`` holds the rest.

    ``row_ids``, ``metadata``, ``token_ids`` and ``offsets`` are aligned by index. With one feature
    row per row, which ``last_prompt`` gives, they are aligned with ``features`` too; otherwise row
    *i* is ``features[offsets[i]:offsets[i + 1]]``. Arrays are read-only.

    Where sites differ in width no one array holds them all: what would need one raises
    :class:`~wllm_ray.errors.NotOfferedError` (``widths_not_representable``) unless it is asked for
    one site. Asked for one site, it reads the files of that site only.
    """

    def __init__(self, files: DatasetFiles) -> None:
        self._files = files

    def __len__(self) -> int:
        return self.manifest.rows_ok

    def __repr__(self) -> str:
        m = self.manifest
        widths = m.width or ", ".join(map(str, m.site_widths))
        return (
            f"ActivationDataset({m.dataset_id!r}: {m.rows_ok} rows, {m.rows_failed} failed, "
            f"{m.shape[0]} × {', '.join(m.sites)} × {widths}, {m.model.name})"
        )

    @property
    def manifest(self) -> Manifest:
        """What the dataset is: checked, frozen."""
        return self._files.manifest

    @property
    def features(self) -> NDArray[np.float32]:
        """[N, D] for one site, else [N, L, D], float32; N counts feature rows.

        Not copied when one file holds it.

        Raises:
            NotOfferedError: The sites differ in width.
            IntegrityError: A shard is damaged.
        """
        stacked = self.features_3d
        return stacked[:, 0] if len(self.manifest.sites) == 1 else stacked

    @cached_property
    def features_3d(self) -> NDArray[np.float32]:
        """[N, L, D] float32 whatever the number of sites; see :attr:`features`."""
        return whole(self._files, None)

    def site(self, name: HookSite | str) -> NDArray[np.float32]:
        """One site's [N, D] float32, by any accepted spelling of its name.

        Not copied when one file holds it.

        Raises:
            InvalidInputError: Not a site, or not one of this dataset (``invalid_site``).
            IntegrityError: A shard is damaged.
        """
        number = site_number(self.manifest, name)
        if "features_3d" in self.__dict__ and self.manifest.shard_layout == "stacked":
            return self.features_3d[:, number]
        return whole(self._files, number)

    @cached_property
    def row_ids(self) -> list[str]:
        """Ids of the good rows."""
        ids: list[str] = self._column("id")
        return ids

    @cached_property
    def metadata(self) -> list[dict[str, Any]]:
        """Metadata of the good rows, as they were given."""
        return [parse_json(text) for text in self._column("metadata")]

    @cached_property
    def token_ids(self) -> list[NDArray[np.int32]]:
        """Token ids of the good rows, each [T] int32."""
        ids = (one for batch in self._good for one in token_arrays(batch))
        return [one for one in ids if one is not None]

    @cached_property
    def request_digests(self) -> list[str]:
        """Request digests of the good rows, as hex."""
        return [digest.hex() for digest in self._column("request_sha256")]

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """[rows + 1] int64: good row *i* is feature rows ``offsets[i]`` to ``offsets[i + 1]``."""
        lengths = [batch.column("length").to_numpy() for batch in self._good]
        return _read_only(np.concatenate([[0], *lengths]).astype(np.int64).cumsum())

    @cached_property
    def failures(self) -> dict[str, FailedRow]:
        """Row id → why the row has no activation and where it stood in the input."""
        failed: dict[str, FailedRow] = {}
        for batch in self._tables:
            columns = (batch.column(name).to_pylist() for name in ("id", "row", "failure"))
            for row_id, index, text in zip(*columns, strict=True):
                if text is not None:
                    failed[row_id] = FailedRow(index=index, **read_failure(text).model_dump())
        return failed

    def iter_batches(
        self,
        size: int,
        *,
        site: HookSite | str | None = None,
        shuffle: bool = False,
        seed: int = 0,
    ) -> Iterator[Batch]:
        """Feature rows in batches, with memory bounded by one batch.

        Args:
            size: Feature rows per batch; the last batch may be shorter.
            site: The only site to read.
            shuffle: Over the whole dataset, by ``numpy.random.default_rng(seed).permutation``.
            seed: For ``shuffle``.

        Yields:
            ``(row_ids, features)``: [size, D] or [size, L, D] float32, and the id of the row that
            each belongs to.

        Raises:
            InvalidInputError: ``size`` is not positive (``invalid_argument``), or there is no
                such site.
            NotOfferedError: The sites differ in width.
            IntegrityError: A shard is damaged.
        """
        number = self._chosen(site)
        order = seed if shuffle else None
        return iter_batches(self._files, number, self.row_ids, self.offsets, size, seed=order)

    def select(self, row_ids: Sequence[str], *, site: HookSite | str | None = None) -> Batch:
        """The feature rows of these rows, in this order, with the id that each belongs to.

        What comes back is a :class:`.batches.Batch`, as from :meth:`iter_batches`: ``row_ids`` and
        a copy of the ``features``, not a smaller dataset.

        Args:
            row_ids: Which rows.
            site: The only site to read.

        Raises:
            InvalidInputError: An id that is not a good row's, or one id instead of a list of them
                (``invalid_argument``), or there is no such site.
            NotOfferedError: The sites differ in width.
            IntegrityError: A shard is damaged.
        """
        if isinstance(row_ids, (str, bytes)):
            raise InvalidInputError(
                f"select takes a list of row ids, found {row_ids!a}; write "
                f"dataset.select([{row_ids!a}])",
                code="invalid_argument",
            )
        rows = [self._position(row_id) for row_id in row_ids]
        spans = [(int(self.offsets[row]), int(self.offsets[row + 1])) for row in rows]
        wanted = [np.arange(start, stop) for start, stop in spans]
        numbers = np.concatenate([np.empty(0, np.int64), *wanted])
        features = pick(self._files, self._chosen(site), numbers)
        ids = [
            row_id
            for row_id, (start, stop) in zip(row_ids, spans, strict=True)
            for _ in range(start, stop)
        ]
        return Batch(ids, features)

    def to_arrow(self) -> pa.Table:
        """A table of the good rows: id, metadata, token_ids and one column per site.

        A site's column is ``fixed_size_list<float32>[D]``, or a list of those where the position
        gives several feature rows per row. A site that has a file to itself is not copied.

        Raises:
            IntegrityError: A shard is damaged.
        """
        return features_table(self._files, self._good)

    def to_torch(self, *, site: HookSite | str | None = None) -> torch.Tensor:
        """``features``, or one site of them, as a tensor on the CPU.

        Nothing is copied when one local file holds it: the file is mapped copy-on-write, so the
        tensor may be changed without touching the file.

        Raises:
            InvalidInputError: There is no such site.
            NotOfferedError: The sites differ in width.
            IntegrityError: A shard is damaged.
        """
        import torch

        return torch.from_numpy(writable(self._files, self._chosen(site)))

    def verify(self) -> verification.VerifyReport:
        """Check everything and report all faults; see :func:`.verify.verify_dataset`."""
        return verification.verify_dataset(self._files.store, self.manifest.dataset_id)

    @cached_property
    def _tables(self) -> list[pa.RecordBatch]:
        return [self._files.rows(shard.shard) for shard in self.manifest.shards]

    @cached_property
    def _good(self) -> list[pa.RecordBatch]:
        return [good_rows(batch) for batch in self._tables]

    @cached_property
    def _index(self) -> dict[str, int]:
        index = {row_id: position for position, row_id in enumerate(self.row_ids)}
        if len(index) != len(self.row_ids):
            raise IntegrityError("a row id occurs twice in the dataset", code="rows_inconsistent")
        return index

    def _column(self, name: str) -> list[Any]:
        return [value for batch in self._good for value in batch.column(name).to_pylist()]

    def _position(self, row_id: str) -> int:
        if row_id in self._index:
            return self._index[row_id]
        failure = self.failures.get(row_id)
        why = f"it failed with {failure.code}" if failure else "there is no such row"
        raise InvalidInputError(
            f"row {row_id!a} has no activation in dataset {self.manifest.dataset_id!r}: {why}",
            code="invalid_argument",
        )

    def _chosen(self, site: HookSite | str | None) -> int | None:
        """The number of the site to read; None for all of them, where there are several."""
        if site is None:
            return 0 if len(self.manifest.sites) == 1 else None
        return site_number(self.manifest, site)


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array
