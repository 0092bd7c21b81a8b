"""Datasets whose values every dtype holds exactly, and stores that tell what was read of them."""

from __future__ import annotations

import numpy as np
from dataset_builders import capture, make_spec, rows_of, site_values

from wllm_ray.dataset.writing.writer import commit_manifest, create_spec, stage_shard

DTYPES = {
    "float32": {},
    "bfloat16": {"storage_dtype": "native", "dtype": "bfloat16"},
    "float16": {"storage_dtype": "float16", "dtype": "float16"},
}


def write_exact(store, rows, *, dtype="float32", **options):
    """Write a dataset of small integers; returns [N, D] float32 for each site."""
    spec = make_spec(rows, **DTYPES[dtype], **options)
    rng = np.random.default_rng(5)
    good = [row for row in rows if row.failure is None]
    values = {
        row.index: rng.integers(
            1, 256, (len(site_values([row], spec, 0)), sum(spec.site_widths))
        ).astype(np.float32)
        for row in good
    }
    create_spec(store, spec)
    engine = "bfloat16" if dtype == "bfloat16" else "float32"
    for shard in range(len(spec.shards)):
        part = rows_of(spec, rows, shard)
        chunk = capture(part, spec, features=values, engine_dtype=engine)
        stage_shard(store, spec, shard, part, [chunk])
    commit_manifest(store, spec.dataset_id)
    side_by_side = np.concatenate([values[row.index] for row in good])
    ends = np.cumsum(spec.site_widths)
    return np.split(side_by_side, ends[:-1], axis=1)


class Recording:
    """A store that remembers what was read of it: (key, bytes) each, whole objects and ranges."""

    def __init__(self, store) -> None:
        self._store = store
        self.uri = store.uri
        self.whole = []
        self.ranges = []

    def __getattr__(self, name):
        return getattr(self._store, name)

    def local_path(self, key):
        return self._store.local_path(key)

    def get(self, key, **options):
        data = self._store.get(key, **options)
        self.whole.append((key.rpartition("/")[2], len(data)))
        return data

    def get_range(self, key, start, stop):
        return bytes(self.get_ranges(key, [(start, stop)])[0])

    def get_ranges(self, key, ranges):
        self.ranges.append((key.rpartition("/")[2], sum(stop - start for start, stop in ranges)))
        return self._store.get_ranges(key, ranges)

    def forget(self):
        self.whole.clear()
        self.ranges.clear()

    @property
    def shards(self):
        """Numbers of the shards whose features were fetched whole, in order."""
        others = (".json", ".rows.arrow", ".trace.arrow")
        return [int(name[6:11]) for name, _ in self.whole if not name.endswith(others)]
