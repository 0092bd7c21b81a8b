"""A fitted probe, and its two files: no pickle, and a digest that is checked before opening."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wllm_ray.digest import canonical_json, parse_json, sha256_hex
from wllm_ray.errors import IntegrityError, InvalidInputError

__all__ = ["Probe", "load_probe", "save_probe"]

PROBE_FORMAT = "wllm_ray.probe"
PROBE_VERSION = 1
_ARRAYS = "probe.npz"
_DOCUMENT = "probe.json"
_ARRAY_NAMES = ("bias", "mean", "scale", "weights")


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """A fitted logistic regression, and which dataset it belongs to.

    Attributes:
        site: The hook site, in its canonical form.
        label: The name of the label.
        classes: The label's values, in the order of the rows of ``weights``.
        dataset_id: The dataset it was fitted on.
        manifest_sha256: The digest of that dataset's manifest.
        mean: [D], over the training rows.
        scale: [D], the standard deviation over the training rows, 1 where that is 0.
        weights: [classes, D], for standardised features.
        bias: [classes].
    """

    site: str
    label: str
    classes: tuple[Any, ...]
    dataset_id: str
    manifest_sha256: str
    mean: NDArray[np.float64]
    scale: NDArray[np.float64]
    weights: NDArray[np.float64]
    bias: NDArray[np.float64]

    def logits(self, features: NDArray[Any]) -> NDArray[np.float64]:
        """[N, classes] scores of [N, D] vectors.

        Raises:
            InvalidInputError: The vectors have another width.
        """
        if features.ndim != 2 or features.shape[1] != len(self.mean):  # noqa: PLR2004 (axes)
            raise InvalidInputError(
                f"expected vectors of shape [rows, {len(self.mean)}] from site {self.site}, found "
                f"{list(features.shape)}; pass dataset.site({self.site!r})",
                code="invalid_argument",
            )
        scores: NDArray[np.float64] = (
            (features - self.mean) / self.scale
        ) @ self.weights.T + self.bias
        return scores

    def predict(self, features: NDArray[Any]) -> list[Any]:
        """The label's most likely value for each of [N, D] vectors."""
        return [self.classes[index] for index in self.logits(features).argmax(axis=1)]


def save_probe(probe: Probe, directory: Path | str) -> None:
    """Write ``probe.npz`` (the numbers) and ``probe.json`` (everything else, and their digest)."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez(buffer, **{name: getattr(probe, name) for name in _ARRAY_NAMES}, allow_pickle=False)
    (folder / _ARRAYS).write_bytes(buffer.getvalue())
    document = {
        "format": PROBE_FORMAT,
        "format_version": PROBE_VERSION,
        "site": probe.site,
        "label": probe.label,
        "classes": list(probe.classes),
        "dataset_id": probe.dataset_id,
        "manifest_sha256": probe.manifest_sha256,
        "arrays_sha256": sha256_hex(buffer.getvalue()),
    }
    (folder / _DOCUMENT).write_bytes(canonical_json(document))


def load_probe(directory: Path | str) -> Probe:
    """Read what :func:`save_probe` wrote; the numbers are checked before they are opened.

    Compare ``manifest_sha256`` with a dataset's to know that the probe was fitted on it.

    Raises:
        IntegrityError: A file is missing or changed, or the format is another one.
    """
    folder = Path(directory)
    document = _read_document(folder)
    data = _read_bytes(folder / _ARRAYS)
    found = sha256_hex(data)
    if found != document.pop("arrays_sha256"):
        raise IntegrityError(
            f"{folder / _ARRAYS} is not the file that {_DOCUMENT} names (it has SHA-256 {found}); "
            f"fit and save the probe again",
            code="digest_mismatch",
        )
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        numbers = {name: arrays[name] for name in _ARRAY_NAMES}
    return Probe(**{**document, "classes": tuple(document["classes"])}, **numbers)


def _read_document(folder: Path) -> dict[str, Any]:
    path = folder / _DOCUMENT
    try:
        document: dict[str, Any] = dict(parse_json(_read_bytes(path)))
    except InvalidInputError as error:
        raise IntegrityError(f"{path}: {error.message}") from None
    found = (document.pop("format", None), document.pop("format_version", None))
    if found != (PROBE_FORMAT, PROBE_VERSION):
        raise IntegrityError(
            f"{path}: expected format {PROBE_FORMAT!r} version {PROBE_VERSION}, found "
            f"{found[0]!r} version {found[1]!r}",
            code="format_unknown",
        )
    return document


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise IntegrityError(
            f"expected a saved probe, but {path} is not there", code="file_missing"
        ) from None
