"""What an engine records about the libraries that it runs on."""

import importlib.metadata

import pytest
import torch

from wllm_ray.capture.facts import library_versions

pytestmark = pytest.mark.requirement("D-2")

PACKAGES = {"numpy", "pyarrow", "pydantic", "ray", "transformers"}


@pytest.fixture
def installed(monkeypatch):
    """The packages that are installed, with versions; tests take some away."""
    there = {name: f"{number}.0" for number, name in enumerate(sorted(PACKAGES), start=1)}

    def version(name):
        if name not in there:
            raise importlib.metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    return there


def test_every_library_that_is_there_is_named_with_its_version(installed, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = library_versions("0.32.0")
    assert found == installed | {
        "wllm_ray": found["wllm_ray"],
        "python": found["python"],
        "torch": str(torch.__version__),
        "cuda": "13.0",
        "vllm": "0.32.0",
    }
    assert all(type(version) is str for version in found.values())


def test_what_is_not_there_is_left_out(installed, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    del installed["ray"], installed["transformers"]
    found = library_versions()
    assert set(found) == {"wllm_ray", "python", "torch", "numpy", "pyarrow", "pydantic"}
