"""Write a dataset in another format: into a folder of its own, whole or not at all."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from wllm_ray._version import __version__
from wllm_ray.dataset.format.manifest import Manifest
from wllm_ray.dataset.reading.files import DatasetFiles, open_manifest
from wllm_ray.dataset.stores.store import Root, open_store
from wllm_ray.digest import canonical_json
from wllm_ray.errors import InvalidInputError, StorageError
from wllm_ray.export.parquet import write_hf, write_parquet
from wllm_ray.export.saelens import write_saelens
from wllm_ray.export.tensors import write_safetensors
from wllm_ray.outputs import local_output

__all__ = ["FORMATS", "PROVENANCE", "export_dataset"]

FORMATS: dict[str, Callable[[DatasetFiles, Path], None]] = {
    "parquet": write_parquet,
    "safetensors": write_safetensors,
    "saelens": write_saelens,
    "hf": write_hf,
}
# What begins with `_` is no data to those who read a whole folder.
PROVENANCE = "_provenance.json"


def export_dataset(root: Root, dataset_id: str, to: str, output: Path | str) -> Path:
    """Write the good rows of a committed dataset in another format.

    The source is only read, and every file of it checked on the way, shard by shard. Beside the
    data lies ``_provenance.json``, which says exactly where they come from.

    Args:
        root: The storage root.
        dataset_id: The dataset's id.
        to: One of :data:`FORMATS`.
        output: A local folder that is empty or does not exist; it appears when it is complete.

    Returns:
        The folder.

    Raises:
        InvalidInputError: There is no such format, the folder is not empty or not local, or the
            dataset cannot be put into this format (``invalid_argument``).
        NotFoundError: The dataset is not committed here (``dataset_not_found``).
        IntegrityError: A file of it is damaged; nothing is left behind.
        StorageError: The folder cannot be written.
        ModuleNotFoundError: The `export` extra is not installed, and the format needs it.
    """
    if to not in FORMATS:
        raise InvalidInputError(
            f"expected one of {', '.join(FORMATS)}, found {to!a}", code="invalid_argument"
        )
    output = local_output(output, "folder")
    store = open_store(root)
    files = DatasetFiles(store, open_manifest(store, dataset_id), "lazy")
    with _new_folder(output) as folder:
        FORMATS[to](files, folder)
        (folder / PROVENANCE).write_bytes(_provenance(files.manifest, to))
    return output


def _provenance(manifest: Manifest, to: str) -> bytes:
    fingerprint = manifest.fingerprint and manifest.fingerprint.model_dump()
    return canonical_json(
        {
            "exported_by": f"wllm_ray {__version__}",
            "exported_to": to,
            "dataset_id": manifest.dataset_id,
            "manifest_sha256": manifest.manifest_sha256,
            "content_sha256": manifest.content_sha256,
            "rows_exported": manifest.rows_ok,
            "rows_failed": manifest.rows_failed,
            "fingerprint": fingerprint,
            "versions": manifest.versions,
            "spec": manifest.spec().model_dump(),
        }
    )


@contextmanager
def _new_folder(output: Path) -> Iterator[Path]:
    """A folder beside ``output`` that takes its place at the end, or vanishes with an error."""
    _expect_free(output)
    folder = output.absolute().parent / f".{output.name}.tmp-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True)
        yield folder
        # Onto an empty folder this is atomic, and onto any other it fails.
        folder.rename(output)
    except StorageError:
        raise  # of the source
    except OSError as error:
        raise StorageError(f"cannot write the export {output}: {error.strerror}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _expect_free(output: Path) -> None:
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        found = f"{output} with something in it" if output.is_dir() else f"the file {output}"
        raise InvalidInputError(
            f"expected a new or empty folder, found {found}; name another one with --output",
            code="invalid_argument",
        )
