"""Which dataset a command is about: a storage root and an id, or one path that says both."""

from __future__ import annotations

from typing import Annotated

import typer

from wllm_ray.errors import InvalidInputError

__all__ = ["DatasetId", "Root", "located"]

Root = Annotated[
    str, typer.Argument(help="Storage root; or, alone, the path ROOT/datasets/DATASET_ID.")
]
DatasetId = Annotated[str | None, typer.Argument(help="The dataset's id.")]


def located(root: str, dataset_id: str | None, *, instead: str = "") -> tuple[str, str]:
    """Storage root and id; a dataset's own path says both.

    Args:
        root: The first argument.
        dataset_id: The second, or None.
        instead: What else the command takes, to be said where neither fits.

    Raises:
        InvalidInputError: There is no id, or the root is none (``invalid_argument``).
    """
    from wllm_ray.dataset.format.layout import split_dataset_path
    from wllm_ray.dataset.stores.store import root_text

    root_text(root)  # refuses what may hold a secret, which a message would repeat
    found = split_dataset_path(root) if dataset_id is None else (root, dataset_id)
    if found is None:
        raise InvalidInputError(
            f"expected ROOT DATASET_ID, or the path ROOT/datasets/DATASET_ID"
            f"{instead}; found {root!a}",
            code="invalid_argument",
        )
    return found
