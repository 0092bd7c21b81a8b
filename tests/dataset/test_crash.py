"""Whatever dies while a dataset is written, readers see all or nothing and a rerun finishes it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from dataset_builders import FAILED_ROW, make_rows, write_dataset
from kill_points import ASKED

from wllm_ray.dataset.store import open_store

pytestmark = pytest.mark.requirement("D-4", "D-5", "R-3")

HERE = Path(__file__).parent


def test_sigkill_before_every_write(tmp_path):
    rows = make_rows(5, failed=[FAILED_ROW])
    store = open_store("memory://never-killed")
    expected = write_dataset(store, rows, **ASKED).content_sha256
    finished = subprocess.run(
        [sys.executable, str(HERE / "kill_points.py"), str(tmp_path)],
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
        env={"PYTHONPATH": f"{HERE}:{HERE.parents[1]}"},
    )
    points = [json.loads(line) for line in finished.stdout.splitlines()]
    assert len(points) > 40
    assert points[-1]["survived"] is True
    good = [row.id for row in rows if row.failure is None]
    for point in points:
        assert point["found"] in (None, 4), point
        assert point["content"] == expected, point
        assert point["rows"] == good, point
    assert points[0]["found"] is None
    assert {point["resumed"] for point in points} == {0, 1, 2}
    # A killed process cannot tidy up; one that lives leaves nothing.
    assert points[-1]["temporary"] == 0
