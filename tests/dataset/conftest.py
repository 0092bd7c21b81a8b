from __future__ import annotations

import itertools

import pytest

from tests.servers import stores
from wllm_ray.dataset.stores.store import open_store

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


@pytest.fixture(scope="session")
def moto(tmp_path_factory):
    """The environment that leads to an S3 server."""
    with stores.moto(tmp_path_factory.mktemp("moto")) as environment:
        yield environment


@pytest.fixture(scope="session")
def azurite(tmp_path_factory):
    """The environment that leads to an Azure server."""
    with stores.azurite(tmp_path_factory.mktemp("azurite")) as environment:
        yield environment


@pytest.fixture(scope="session")
def s3rver(tmp_path_factory):
    """The environment that leads to an S3 server that ignores conditions."""
    with stores.s3rver(tmp_path_factory.mktemp("s3rver")) as environment:
        yield environment


@pytest.fixture
def s3_root(moto, monkeypatch):
    """A new storage root on the S3 server."""
    for name, value in moto.items():
        monkeypatch.setenv(name, value)
    return f"s3://{stores.BUCKET}/test-{next(_names)}"
