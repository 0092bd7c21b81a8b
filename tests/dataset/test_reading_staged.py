"""What records name and a root does not show: lost documents, listings that lag behind."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from dataset_builders import make_rows, make_spec, stage_all, write_dataset

from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.tools.gc import collect_garbage
from wllm_ray.dataset.tools.merge import merge_datasets
from wllm_ray.dataset.writing.writer import commit_manifest
from wllm_ray.errors import IntegrityError

pytestmark = pytest.mark.requirement("D-5")


@pytest.mark.parametrize(
    "call",
    [
        lambda store: merge_datasets(store, ["d"], "e"),
        lambda store: commit_manifest(store, "d"),
    ],
)
def test_a_committed_dataset_that_lost_its_spec_was_begun(store, call):
    write_dataset(store, make_rows(6))
    store.delete("datasets/d/spec.json")
    with pytest.raises(IntegrityError, match=r"spec\.json: it is missing.* is committed") as error:
        call(store)
    assert error.value.code == "file_missing"


class Lagging:
    """A store that does not list yet what was written last."""

    def __init__(self, store, suffix) -> None:
        self._store, self._suffix = store, suffix

    def __getattr__(self, name):
        return getattr(self._store, name)

    def list(self, prefix):
        return [one for one in self._store.list(prefix) if not one[0].endswith(self._suffix)]


@pytest.mark.parametrize("suffix", [".npy", ".rows.arrow"])
def test_what_a_listing_lacks_is_asked_for_before_it_is_called_missing(store, suffix):
    rows = make_rows(6)
    stage_all(store, make_spec(rows), rows)
    lagging = Lagging(store, suffix)
    assert commit_manifest(lagging, "d").rows == 6
    later = datetime.now(UTC) + timedelta(days=2)
    (report,) = collect_garbage(lagging, "d", delete=True, now=later)
    assert (report.state, report.damage, report.leftovers) == ("committed", None, ())
    assert load_dataset(lagging, "d").features.shape == (6, 4)
    lost = next(key for key, _ in store.list("datasets") if key.endswith(suffix))
    store.delete(lost)
    for call in (lambda: commit_manifest(lagging, "d"), lambda: load_dataset(lagging, "d")):
        with pytest.raises(IntegrityError, match="it is missing") as error:
            call()
        assert error.value.code == "file_missing"
    (report,) = collect_garbage(lagging, "d", delete=True, now=later)
    assert (report.state, report.damage.code) == ("damaged", "file_missing")
