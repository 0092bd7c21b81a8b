from __future__ import annotations

import itertools

import pytest

from wllm_ray.dataset.store import open_store

_names = itertools.count()


@pytest.fixture(params=["local", "memory"])
def root(request, tmp_path):
    """The two backends that need no server; every contract test runs on both."""
    if request.param == "local":
        return str(tmp_path / "root")
    return f"memory://test-{next(_names)}"


@pytest.fixture
def store(root):
    return open_store(root)


@pytest.fixture
def local(tmp_path):
    return open_store(tmp_path / "root")
