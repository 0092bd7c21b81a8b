"""Whatever dies while a dataset is written, readers see all or nothing and a rerun finishes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from dataset_builders import write_dataset
from kill_points import KINDS, ROWS
from killing_proxy import KillingProxy

from wllm_ray.dataset.stores.store import open_store

pytestmark = pytest.mark.requirement("D-4", "D-5", "R-3")

HERE = Path(__file__).parent
GOOD = [row.id for row in ROWS if row.failure is None]


def default(*kinds):
    """All kinds, of which only these belong to the default run."""
    slow = set(KINDS) - {"committers"} - set(kinds)
    return [*kinds, *(pytest.param(kind, marks=pytest.mark.slow) for kind in sorted(slow))]


def killed_at_each_point(*arguments, **environment):
    """Every point's findings; the last writer survived."""
    finished = subprocess.run(
        [sys.executable, str(HERE / "kill_points.py"), *map(str, arguments)],
        stdout=subprocess.PIPE,
        check=True,
        timeout=500,
        env={**environment, "PYTHONPATH": f"{HERE}:{HERE.parents[1]}", "PATH": os.environ["PATH"]},
    )
    points = [json.loads(line) for line in finished.stdout.splitlines()]
    assert points[-1]["survived"] is True
    return points


def expect_all_or_nothing(points, kind):
    store = open_store(f"memory://never-killed-{kind}")
    expected = write_dataset(store, ROWS, **KINDS[kind]).content_sha256
    for point in points:
        assert point["found"] in (None, len(GOOD)), point
        assert point["content"] == expected, point
        assert point["rows"] == GOOD, point
        assert point["faults"] == [], point
    # A killed process cannot tidy up; one that lives leaves nothing.
    assert points[-1]["temporary"] == 0


@pytest.mark.parametrize("kind", default("per_site"))
def test_sigkill_at_every_system_call(tmp_path, kind):
    points = killed_at_each_point(kind, tmp_path)
    expect_all_or_nothing(points, kind)
    assert len(points) > 40
    assert points[0]["found"] is None
    assert {point["resumed"] for point in points} == {0, 1, 2}
    # Between the link that commits and the call that makes it durable, and after.
    assert sum(point["found"] is not None for point in points) >= 3


@pytest.mark.parametrize("kind", default("stacked"))
def test_sigkill_after_every_change_of_an_object_store(moto, kind):
    environment = moto.copy()
    with KillingProxy(environment.pop("AWS_ENDPOINT_URL")).running() as proxy:
        url = f"http://127.0.0.1:{proxy.port}"
        root = f"s3://roots/killed-{kind}"
        points = killed_at_each_point(kind, root, url, **environment, AWS_ENDPOINT_URL=url)
        uploads = [path for method, path in proxy.heard if method == "POST" and "uploads" in path]
    expect_all_or_nothing(points, kind)
    assert {point["resumed"] for point in points} == {0, 1, 2}
    assert len(points) >= 7
    assert bool(uploads) is (kind == "large")


def test_sigkill_of_one_of_two_committers(tmp_path):
    points = killed_at_each_point("committers", tmp_path)
    expect_all_or_nothing(points, "committers")
    assert all(point["found"] == len(GOOD) for point in points)
