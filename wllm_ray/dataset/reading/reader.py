"""Load a committed dataset: NumPy and Arrow on a CPU, no model, no GPU, no Ray.

::

    dataset = load_dataset("root", "my-dataset")  # or its folder, "root/datasets/my-dataset"
    dataset.features      # [N, D] float32, memory-mapped
    dataset.row_ids[0], dataset.metadata[0], dataset.token_ids[0]
"""

from __future__ import annotations

from wllm_ray.dataset.format.layout import split_dataset_path
from wllm_ray.dataset.reading import verify as verification
from wllm_ray.dataset.reading.activations import ActivationDataset
from wllm_ray.dataset.reading.files import DatasetFiles, open_manifest
from wllm_ray.dataset.reading.recorded import Verify
from wllm_ray.dataset.reading.rowindex import FailedRow
from wllm_ray.dataset.stores.store import Root, open_store, root_text
from wllm_ray.errors import InvalidInputError

__all__ = ["ActivationDataset", "FailedRow", "load_dataset"]


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
    given = root_text(root)  # refuses what may hold a secret, which a message would repeat
    found = None if given is None else split_dataset_path(given)
    if found is None:
        shown = "an open store" if given is None else ascii(given)
        raise InvalidInputError(
            f"expected load_dataset(ROOT, DATASET_ID), or the path ROOT/datasets/DATASET_ID alone; "
            f"found {shown} alone",
            code="invalid_argument",
        )
    return found
