"""Feature rows for PyTorch's ``DataLoader``; imported only where PyTorch is asked for.

Tensors have the dtype that is stored, so a bfloat16 dataset travels to the device as such. An item
holds, for one feature row or for a batch of them:

- ``id``: the id of its row;
- ``row``: the number of that row, its place in ``dataset.metadata`` and ``token_ids``;
- ``index_in_row``: which of the row's feature rows it is; at ``all_prompt``, of which token;
- ``features``: [D] of one site, else [L, D]; [B, …] in a batch.

A dataset reaches worker processes by the address of its root. One in an object store is read in
those that are spawned, not forked (``multiprocessing_context="spawn"``), and one in ``memory://``
in this process alone; each says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wllm_ray.dataset.format.dtypes import Dtype
from wllm_ray.dataset.reading.batches import Batches
from wllm_ray.dataset.reading.picking import Picker
from wllm_ray.dataset.reading.rowindex import RowIndex
from wllm_ray.errors import InvalidInputError
from wllm_ray.extras import not_installed

try:
    import torch
    import torch.distributed
    from torch.utils.data import Dataset, IterableDataset, get_worker_info
except ModuleNotFoundError as error:
    raise not_installed(error, "pip install torch") from None

__all__ = ["FeatureBatches", "FeatureRows", "tensor_of"]


def tensor_of(stored: NDArray[Any], dtype: Dtype) -> torch.Tensor:
    """Stored values as a tensor of their own dtype; not copied.

    Args:
        stored: As :meth:`.files.DatasetFiles.stored` gives them, but writable.
        dtype: How they are stored.
    """
    if dtype == "bfloat16":
        return torch.from_numpy(stored.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(stored)


class FeatureRows(Dataset):  # type: ignore[misc]  # torch has no types here
    """Map-style: item *i* is feature row *i* of the dataset, whatever its position.

    Args:
        picker: Reads the features.
        rows: Knows which rows they belong to.
    """

    def __init__(self, picker: Picker, rows: RowIndex) -> None:
        self._picker = picker
        self._rows = rows

    def __len__(self) -> int:
        return self._picker.files.manifest.feature_rows

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Several items, read at once: what a ``DataLoader`` asks for.

        Raises:
            IndexError: There is no such feature row.
            IntegrityError: A shard is damaged.
        """
        wanted = np.asarray(numbers, np.int64)
        wanted = np.where(wanted < 0, wanted + len(self), wanted)
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(self):
            outside = next(n for n in numbers if not -len(self) <= n < len(self))
            raise IndexError(f"feature row {outside} of a dataset that has {len(self)}")
        origins = self._rows.all_labels.of(wanted)
        stored = self._picker.pick(wanted, sweep=True)
        features = tensor_of(stored, self._picker.files.manifest.dtype)
        names = ("id", "row", "index_in_row", "features")
        rows, index_in_row = origins.rows.tolist(), origins.index_in_row.tolist()
        items = zip(origins.row_ids, rows, index_in_row, features, strict=True)
        return [dict(zip(names, item, strict=True)) for item in items]


class FeatureBatches(IterableDataset):  # type: ignore[misc]  # torch has no types here
    """Iterable: the batches of one pass, shared out over ranks and their worker processes.

    With *R* ranks, rank *r* gets batches *r*, *r* + *R*, *r* + 2 *R* …, in this order and whatever
    the number of its workers: the ``DataLoader`` takes from them in turn, and they read in turn.
    So one rank gets the very batches that ``iter_batches`` gives, and together the ranks get every
    feature row once. Without ``drop_last`` some ranks may get one batch more than others.

    Args:
        batches: Of the pass before the first one is begun, epoch 0.
        rank: Which of the ranks this is; with ``world_size``, or neither.
        world_size: How many there are.

    Raises:
        InvalidInputError: ``rank`` is none of ``world_size`` (``invalid_argument``).
    """

    def __init__(self, batches: Batches, *, rank: int | None, world_size: int | None) -> None:
        self._batches = batches
        self._rank, self._world_size = _place(rank, world_size)
        # Workers that outlive a pass have copies of this object, but see the same memory.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(range(self._rank, self._stop, self._world_size))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        first = self._rank + number * self._world_size
        batches = self._of_epoch()
        for one in range(first, self._stop, workers * self._world_size):
            origins, stored = batches.stored(one)
            owned = stored if stored.flags.writeable else stored.copy()
            yield {
                "id": origins.row_ids,
                "row": torch.from_numpy(origins.rows),
                "index_in_row": torch.from_numpy(origins.index_in_row),
                "features": tensor_of(owned, batches.picker.files.manifest.dtype),
            }

    def set_epoch(self, epoch: int) -> None:
        """Shuffle the passes that begin from now on as the seed ``seed + epoch`` does."""
        self._epoch.fill_(epoch)

    def _of_epoch(self) -> Batches:
        seed, epoch = self._batches.seed, int(self._epoch)
        return self._batches if seed is None else replace(self._batches, seed=seed + epoch)

    @property
    def _stop(self) -> int:
        """Which batch is not read any more, by any rank."""
        uneven = len(self._batches) % self._world_size if self._batches.drop_last else 0
        return len(self._batches) - uneven


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """The rank and how many there are; what ``torch.distributed`` says where neither is given."""
    if rank is None and world_size is None:
        parallel = torch.distributed
        if not (parallel.is_available() and parallel.is_initialized()):
            return 0, 1
        return parallel.get_rank(), parallel.get_world_size()
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise InvalidInputError(
            f"rank is one of 0 to world_size - 1, and both are given or neither; found rank "
            f"{rank} and world_size {world_size}",
            code="invalid_argument",
        )
    return rank, world_size
