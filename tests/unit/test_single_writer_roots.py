"""A root that ignores the condition of a write: neither an application nor a job starts on it."""

import json
import warnings
from unittest.mock import MagicMock

import pytest
import typer
from typer.testing import CliRunner

from tests.fakes import MODEL, REVISION, FakeTokenizer, fake_description
from wllm_ray.dataset.stores.remote import ObjectStore
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.errors import ConflictError
from wllm_ray.extraction import ExtractionLimits, Offer
from wllm_ray.records import ModelIdentity

with warnings.catch_warnings():  # Ray's own use of pydantic is not ours to mend
    warnings.simplefilter("ignore")
    from deployments import ingress, joining
    from deployments.args import AppArgs
    from deployments.job import job

pytestmark = pytest.mark.requirement("D-4")


@pytest.fixture
def root(request, monkeypatch):
    """The last of two writers wins on it, as on servers that do not know `If-None-Match`."""

    def create(store, key, body):
        store._overwrite(key, [memoryview(body)])
        return True

    monkeypatch.setattr(ObjectStore, "_create", create)
    return f"memory://{request.node.name}"


@pytest.mark.requirement("R-1")
async def test_an_application_does_not_start(root, monkeypatch):
    monkeypatch.setattr(ingress, "TransformersTokenizer", lambda *_, **__: FakeTokenizer())
    # An application's root cannot be in memory.
    monkeypatch.setattr(ingress, "open_store", lambda _: open_store(root))
    args = AppArgs(model=MODEL, storage_root="s3://bucket/root")
    identity = ModelIdentity(name=MODEL, revision=REVISION)
    # The class as it is written: only Serve can end an object of what Serve makes of it.
    _, written, *_ = ingress.Ingress.__mro__
    application = object.__new__(written)
    with pytest.raises(ConflictError, match="does not honour create-only writes") as error:
        await application.__init__(args, identity, MagicMock())
    assert error.value.code == "single_writer_root"
    assert open_store(root).list("datasets") == []


@pytest.mark.requirement("L-5")
@pytest.mark.parametrize("named", ["by the command", "by the application"])
def test_a_job_does_not_start(root, monkeypatch, tmp_path, named):
    """Whoever names the root: the application's own may have changed since it started."""
    joined = MagicMock()
    own = None if named == "by the command" else root
    joined.offer.return_value = Offer(fake_description(), ExtractionLimits(), own)
    for name, stand_in in {
        "connect": lambda: None,
        "disconnect": lambda: None,
        "wait_running": lambda *_: None,
        "JoinedApplication": lambda *_: joined,
    }.items():
        monkeypatch.setattr(joining, name, stand_in)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"id": "a", "prompt": "x"}) + "\n")
    command = typer.Typer()
    command.command()(job)
    # Nor can the root of a job that is named to it.
    monkeypatch.setattr("deployments.job.open_store", lambda _: open_store(root))
    storage = ["--storage", "s3://bucket/root"] if own is None else []
    arguments = [str(rows), "--layer", "0", *storage]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert "does not honour create-only writes" in " ".join(result.stderr.split())
    assert not joined.tokenize.called
    assert not joined.replicas.capture.options.called
    assert open_store(root).list("datasets") == []
