"""A committed dataset as its readers see it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from wllm_ray.dataset.format.manifest import Manifest
from wllm_ray.dataset.format.trace import Trace
from wllm_ray.dataset.reading import verify as verification
from wllm_ray.dataset.reading.batches import Batch, Batches, labelled, stored, whole, writable
from wllm_ray.dataset.reading.files import DatasetFiles
from wllm_ray.dataset.reading.picking import Picker
from wllm_ray.dataset.reading.rowindex import FailedRow, RowIndex
from wllm_ray.dataset.reading.sitenames import listed, site_number
from wllm_ray.dataset.reading.table import features_table
from wllm_ray.errors import InvalidInputError, NotOfferedError
from wllm_ray.lazy import lazy
from wllm_ray.sites import HookSite

if TYPE_CHECKING:
    import torch

    from wllm_ray.dataset.reading.torch_data import FeatureBatches, FeatureRows

__all__ = ["ActivationDataset"]


class ActivationDataset:
    """A committed dataset. Good rows only, in request order; ``failures`` holds the rest.

    ``row_ids``, ``metadata``, ``token_ids`` and ``offsets`` are aligned by index, and read when
    they are first asked for. With one feature row per row, which ``last_prompt`` gives, they are
    aligned with ``features`` too; otherwise row *i* is ``features[offsets[i]:offsets[i + 1]]``.

    NumPy and Arrow always get float32, which holds every stored value exactly; PyTorch gets the
    dtype that is stored, and so does :meth:`stored`. Arrays are read-only.

    Where sites differ in width no one array holds them all: what would need one raises
    :class:`~wllm_ray.errors.NotOfferedError` (``widths_not_representable``) unless it is asked for
    one site. Asked for one site, it reads the files of that site only.

    Any number of threads may read at once. A dataset can be pickled, unless its root lies in
    memory: what travels is the address of the root, the manifest and what was checked so far.
    """

    def __init__(self, files: DatasetFiles) -> None:
        self._files = files
        self._rows = RowIndex(files)
        self._pickers: dict[int | None, Picker] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return ActivationDataset, (self._files,)

    def __len__(self) -> int:
        return self.manifest.rows_ok

    def __repr__(self) -> str:
        m = self.manifest
        widths = m.width or f"widths {listed(m.site_widths)}"
        return (
            f"ActivationDataset({m.dataset_id!r}: {m.rows_ok} rows, {m.rows_failed} failed, "
            f"{m.shape[0]} × {listed(m.sites)} × {widths}, {m.model.name})"
        )

    @property
    def manifest(self) -> Manifest:
        """What the dataset is: checked, frozen."""
        return self._files.manifest

    @property
    def features(self) -> NDArray[np.float32]:
        """[N, D] for one site, else [N, L, D], float32; N counts feature rows.

        Not copied where one local file holds it and stores float32; raises as :meth:`to_torch`.
        """
        stacked = self.features_3d
        return stacked[:, 0] if len(self.manifest.sites) == 1 else stacked

    @lazy
    def features_3d(self) -> NDArray[np.float32]:
        """[N, L, D] float32 whatever the number of sites; see :attr:`features`."""
        return whole(self._files, None)

    def site(self, name: HookSite | str) -> NDArray[np.float32]:
        """One site's [N, D] float32, by any accepted spelling of its name.

        Not copied where one local file holds it and stores float32.

        Raises:
            InvalidInputError: Not a site, or not one of this dataset (``invalid_site``).
            IntegrityError: A shard is damaged.
        """
        number = site_number(self.manifest, name)
        if "features_3d" in self.__dict__ and self.manifest.shard_layout == "stacked":
            return self.features_3d[:, number]
        return whole(self._files, number)

    def stored(self, site: HookSite | str | None = None) -> NDArray[Any]:
        """``features``, or one site of them, as ``manifest.dtype`` says they are stored.

        NumPy has no bfloat16: these are then its 16 bits as uint16, of which
        ``np.left_shift(stored, 16, dtype="<u4").view("<f4")`` makes float32. Not copied where one
        local file holds it; raises as :meth:`to_torch`.
        """
        return stored(self._files, self._chosen(site))

    @lazy
    def row_ids(self) -> list[str]:
        """Ids of the good rows."""
        return self._rows.row_ids()

    @lazy
    def metadata(self) -> list[dict[str, Any]]:
        """Metadata of the good rows, as they were given."""
        return self._rows.metadata()

    @lazy
    def token_ids(self) -> list[NDArray[np.int32]]:
        """Token ids of the good rows, each [T] int32."""
        return self._rows.token_ids()

    @lazy
    def request_digests(self) -> list[str]:
        """Request digests of the good rows, as hex."""
        return self._rows.request_digests()

    @property
    def offsets(self) -> NDArray[np.int64]:
        """[rows + 1] int64: good row *i* is feature rows ``offsets[i]`` to ``offsets[i + 1]``."""
        return self._rows.all_labels.offsets

    @property
    def failures(self) -> dict[str, FailedRow]:
        """Row id → why the row has no activation and where it stood in the input."""
        return self._rows.failures

    def iter_batches(
        self,
        size: int,
        *,
        site: HookSite | str | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
    ) -> Iterator[Batch]:
        """Feature rows in batches.

        Memory is bounded by one batch and 256 MiB of what cannot be mapped; shuffling takes 8
        bytes for each feature row and some 30 for each row. In order, shards of an object store
        are fetched whole, one after the other; shuffled, a dataset that does not fit into what is
        kept is fetched row by row once all of it was checked.

        Args:
            size: Feature rows per batch; the last batch may be shorter.
            site: The only site to read.
            shuffle: Over the whole dataset, by ``numpy.random.default_rng(seed).permutation``.
            seed: For ``shuffle``.
            drop_last: Leave out the last batch where it is shorter.

        Yields:
            ``features``, [size, D] or [size, L, D] float32, and where each comes from:
            ``row_ids``, ``rows`` and ``index_in_row``.

        Raises:
            InvalidInputError: ``size`` is not positive (``invalid_argument``), or there is no
                such site.
            NotOfferedError: The sites differ in width.
            IntegrityError: A shard is damaged.
        """
        picker = self._picker(site)
        return iter(Batches(picker, self._rows, size, seed if shuffle else None, drop_last))

    def select(self, row_ids: Sequence[str], *, site: HookSite | str | None = None) -> Batch:
        """The feature rows of these rows, in this order, and where each comes from.

        What comes back is a batch, as from :meth:`iter_batches`, and not a smaller dataset. The
        first call makes an index of all ids.

        Raises:
            InvalidInputError: An id that is not a good row's, or one id instead of a list of them
                (``invalid_argument``), or there is no such site.
            NotOfferedError: The sites differ in width.
            IntegrityError: A shard is damaged.
        """
        if isinstance(row_ids, (str, bytes)) or not isinstance(row_ids, Iterable):
            instead = f"; write dataset.select([{row_ids!a}])" if isinstance(row_ids, str) else ""
            raise InvalidInputError(
                f"select takes a list of row ids, found {row_ids!a}{instead}",
                code="invalid_argument",
            )
        rows = [self._rows.number_of(row_id) for row_id in row_ids]
        wanted = [np.arange(self.offsets[row], self.offsets[row + 1]) for row in rows]
        numbers = np.concatenate([np.empty(0, np.int64), *wanted])
        return labelled(self._picker(site), self._rows.all_labels, numbers)

    def trace(self, row_id: str) -> Trace:
        """What one row did inside the model: every traced site at each of its tokens.

        Raises:
            InvalidInputError: Not the id of a good row (``invalid_argument``).
            NotOfferedError: The dataset was captured without traces (``feature_not_offered``).
            IntegrityError: The traces are damaged.
        """
        if self.manifest.trace is None:
            raise NotOfferedError(
                f"dataset {self.manifest.dataset_id!r} holds no traces; to have them, capture it "
                f"under another id with StorageOptions(full_trace=True), or over HTTP with "
                f"persistence `full_trace`",
                code="feature_not_offered",
            )
        return self._rows.trace(row_id)

    def to_arrow(self) -> pa.Table:
        """A table of the good rows: id, metadata, token_ids and one column per site.

        A site's column is ``fixed_size_list<float32>[D]``, or a list of those where the position
        gives several feature rows per row. Not copied where a site has a file to itself, which
        stores float32; raises as :meth:`to_torch`.
        """
        return features_table(self._files, self._rows.tables())

    def to_torch(self, *, site: HookSite | str | None = None) -> torch.Tensor:
        """``features``, or one site of them, as a tensor on the CPU, of the dtype that is stored.

        Nothing is copied where one local file holds it: the file is mapped copy-on-write, so the
        tensor may be changed without touching the file.

        Raises:
            InvalidInputError: There is no such site.
            NotOfferedError: The sites differ in width.
            IntegrityError: A shard is damaged.
        """
        from wllm_ray.dataset.reading.torch_data import tensor_of

        return tensor_of(writable(self._files, self._chosen(site)), self.manifest.dtype)

    def torch_dataset(self, *, site: HookSite | str | None = None) -> FeatureRows:
        """A map-style dataset for PyTorch, with an item for each feature row.

        What an item holds is said in :mod:`.torch_data`. Raises as :meth:`to_torch`.
        """
        from wllm_ray.dataset.reading.torch_data import FeatureRows

        return FeatureRows(self._picker(site), self._rows)

    def torch_iterable(
        self,
        batch_size: int,
        *,
        site: HookSite | str | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> FeatureBatches:
        """The batches of :meth:`iter_batches` for a PyTorch ``DataLoader(…, batch_size=None)``.

        Args:
            batch_size: Feature rows per batch.
            site: The only site to read.
            shuffle: By ``numpy.random.default_rng(seed + epoch).permutation``.
            seed: For ``shuffle``.
            drop_last: Leave out what would give ranks unlike numbers of batches, or a short one.
            rank: Which of the training processes this is; with ``world_size``, or neither. What
                ``torch.distributed`` says where omitted, or the only one where that is not up.
            world_size: How many training processes there are.

        Raises:
            InvalidInputError: ``batch_size`` is not positive, or ``rank`` is none of
                ``world_size`` (``invalid_argument``), or there is no such site.
            NotOfferedError: The sites differ in width.
        """
        from wllm_ray.dataset.reading.torch_data import FeatureBatches

        return FeatureBatches(
            Batches(
                self._picker(site), self._rows, batch_size, seed if shuffle else None, drop_last
            ),
            rank=rank,
            world_size=world_size,
        )

    def verify(self) -> verification.VerifyReport:
        """Check everything and report all faults; see :func:`.verify.verify_dataset`."""
        return verification.verify_dataset(self._files.store, self.manifest.dataset_id)

    def _picker(self, site: HookSite | str | None) -> Picker:
        number = self._chosen(site)
        return self._pickers.setdefault(number, Picker(self._files, number))

    def _chosen(self, site: HookSite | str | None) -> int | None:
        """The number of the site to read; None for all of them, where there are several."""
        if site is None:
            return 0 if len(self.manifest.sites) == 1 else None
        return site_number(self.manifest, site)
