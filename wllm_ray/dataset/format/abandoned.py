"""The mark of a dataset that was given up: it stands where the manifest would, for good.

Manifest and mark are created under one name, create-only: whoever comes first has decided. So the
mark has to stay. Were it removed with the rest, a committer that had looked at the files before,
and was slow since, would create a manifest over nothing.
"""

from __future__ import annotations

from wllm_ray.digest import canonical_json

__all__ = ["abandoned_mark"]


def abandoned_mark(dataset_id: str) -> bytes:
    """The bytes of the mark; no manifest is as short."""
    return canonical_json(
        {"dataset_id": dataset_id, "format": "wllm_ray.abandoned", "format_version": 1}
    )
