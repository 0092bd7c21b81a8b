"""Where feature rows lie, however many each shard has."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wllm_ray.dataset.reading.files import DatasetFiles

# Of a dataset that was asked for 3 rows a shard, and of any.
EVEN = st.builds(lambda shards, last: [3] * shards + [last], st.integers(0, 4), st.integers(0, 3))
COUNTS = EVEN | st.lists(st.integers(0, 4), min_size=1, max_size=6)


@pytest.mark.requirement("P-4")
@given(COUNTS, st.randoms())
def test_every_feature_row_is_found_in_its_shard(counts, random):
    shards = [SimpleNamespace(feature_rows=count) for count in counts]
    files = DatasetFiles(None, SimpleNamespace(shards=shards), "lazy")
    expected = [shard for shard, count in enumerate(counts) for _ in range(count)]
    numbers = list(range(len(expected)))
    random.shuffle(numbers)
    found = files.shards_of(np.array(numbers, np.int64))
    assert found.tolist() == [expected[number] for number in numbers]
