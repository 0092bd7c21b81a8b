"""Packages that may be missing: the error says what to install, in words that can be followed."""

import sys
from pathlib import Path

import pytest

from tests.dataset.dataset_builders import make_rows, write_dataset
from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.extras import require_extra

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.requirement("S-5")


def test_a_module_that_an_extra_brings_is_imported_or_its_package_named(monkeypatch):
    assert require_extra("json.decoder") is sys.modules["json.decoder"]
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(
        ModuleNotFoundError,
        match=r"^this needs sklearn, which is not installed: "
        r"pip install '\.\[probe\]' in a checkout of wllm_ray$",
    ) as caught:
        require_extra("sklearn")
    assert caught.value.name == "sklearn"


@pytest.mark.parametrize(
    "ask",
    [
        lambda dataset: dataset.to_torch(),
        lambda dataset: dataset.torch_dataset(),
        lambda dataset: dataset.torch_iterable(4),
    ],
    ids=["to_torch", "torch_dataset", "torch_iterable"],
)
def test_where_torch_is_missing_the_error_says_so(monkeypatch, ask):
    write_dataset(open_store("memory://no-torch"), make_rows(4))
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "wllm_ray.dataset.reading.torch_data", raising=False)
    with pytest.raises(
        ModuleNotFoundError, match=r"^this needs torch, which is not installed: pip install torch$"
    ):
        ask(load_dataset("memory://no-torch", "d"))


def test_nothing_is_advised_that_needs_an_index():
    wrong = [
        path.relative_to(ROOT)
        for pattern in ("*.py", "*.md")
        for path in (ROOT / "wllm_ray").rglob(pattern)
        if "pip install wllm" in (text := path.read_text()) or "'wllm-ray[" in text
    ]
    assert wrong == []
