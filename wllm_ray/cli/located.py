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


def located(root: str, dataset_id: str | None) -> tuple[str, str]:
    """Storage root and id; a dataset's own path says both."""
    from wllm_ray.dataset.format.layout import split_dataset_path

    found = split_dataset_path(root) if dataset_id is None else (root, dataset_id)
    if found is None:
        raise InvalidInputError(
            f"expected ROOT DATASET_ID, or the path ROOT/datasets/DATASET_ID; found {root!a}",
            code="invalid_argument",
        )
    return found
