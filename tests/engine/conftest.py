"""Real vLLM on the CPU, one engine after the other in this process; Transformers is the truth."""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import pytest
from reference import RemoteReference
from tiny_models import FAMILIES, QUICK, VOCAB, build_tiny_model

from wllm_ray.capture.coverage import SitesWanted
from wllm_ray.capture.vllm_capture import VLLMCapture
from wllm_ray.offered import offered_sites, site_widths
from wllm_ray.records import CaptureTask, ModelIdentity, TokenizerIdentity, TokenRow
from wllm_ray.sites import HookSite

SPLIT = 64
# For parametrize: every family; all but one of each structure only where `slow` is asked for.
EACH_FAMILY = [
    *QUICK,
    *(pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES if one not in QUICK),
]

# Not ours to mend: what vLLM and its libraries say of their own code.
_FOREIGN_WARNINGS = (
    r"ignore:::vllm(\..*)?",
    r"ignore:::torch(\..*)?",
    r"ignore:::transformers(\..*)?",
)


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/engine" in str(item.path):
            for line in _FOREIGN_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(line))


@pytest.fixture(scope="session")
def transformers_process():
    """A process with Transformers as it is: vLLM changes those of its classes that it runs."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        yield process


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory, transformers_process):
    """``tiny_model("qwen3")`` → its directory; built once."""
    built = {}

    def build(family):
        if family not in built:
            path = tmp_path_factory.mktemp(family) / family
            built[family] = transformers_process.submit(build_tiny_model, family, path).result()
        return built[family]

    return build


@pytest.fixture(scope="session")
def open_engine(tiny_model):
    """``open_engine("qwen3", dtype="bfloat16")`` → a started engine; the caller closes it."""

    def start(family, path=None, **options):
        identity = ModelIdentity(name=f"tiny-{family}", revision="sha256:test")
        tokenizer = TokenizerIdentity(
            name=f"tiny-{family}", revision="sha256:test", chat_template_sha256=None
        )
        return VLLMCapture(
            str(path or tiny_model(family)),
            model_identity=identity,
            tokenizer_identity=tokenizer,
            **{"prefill_split_tokens": SPLIT, "max_num_seqs": 8} | options,
        )

    return start


@pytest.fixture(scope="session")
def reference(tiny_model, transformers_process):
    """``reference("qwen3")`` → Transformers in float32, one prompt at a time, without padding."""
    return lambda family, dtype="float32": RemoteReference(
        transformers_process, tiny_model(family), family, dtype
    )


@pytest.fixture(scope="module")
def engine(open_engine):
    """One tiny Qwen3 for a module's tests: split at 64 tokens, 8 prompts in a pass."""
    with open_engine("qwen3") as started:
        yield started


def prompts_of(lengths, seed=0):
    """Random prompts of these lengths, as int32 arrays."""
    random = np.random.default_rng(seed)
    return [random.integers(3, VOCAB, length).astype(np.int32) for length in lengths]


def task_of(prompts, layers=(0, 1, 2, 3), first_index=0, *, sites=None, position="last_prompt"):
    """A task for the stream after these blocks, or for ``sites`` by name."""
    stream = tuple(HookSite(layer, "resid_post") for layer in layers)
    return CaptureTask(
        sites=stream if sites is None else tuple(HookSite.parse(name) for name in sites),
        position=position,
        rows=tuple(TokenRow(first_index + i, ids) for i, ids in enumerate(prompts)),
    )


def wanted_of(engine, *sites):
    """What the engine's inner parts are told of these sites, by name."""
    readings = engine._anatomy.readings
    parsed = tuple(HookSite.parse(name) for name in sites)
    return SitesWanted(
        sites=parsed,
        widths=tuple(readings[site].width for site in parsed),
        depth=max(readings[site].depth for site in parsed),
    )


def relative_l2(found, expected):
    """[...] relative L2 over the last axis, in float64."""
    difference = np.linalg.norm(found.astype(np.float64) - expected, axis=-1)
    return difference / np.linalg.norm(expected.astype(np.float64), axis=-1)


def stacked(chunk):
    """[feature rows, sites, width] of a chunk whose sites are equally wide."""
    return chunk.features.reshape(len(chunk.features), len(chunk.widths), -1)


def capture_everything(engine, prompts):
    """Site name → [tokens of all prompts, width], from one call for all that is offered."""
    sites = offered_sites(engine.description)
    names = [str(site) for site in sites]
    chunk = engine.capture(task_of(prompts, sites=names, position="all_prompt"))
    assert chunk.failures == {}
    assert chunk.row_index.tolist() == list(range(len(prompts)))
    assert chunk.lengths.tolist() == [len(prompt) for prompt in prompts]
    assert chunk.widths == site_widths(engine.description, sites)
    assert chunk.features.shape == (sum(map(len, prompts)), sum(chunk.widths))
    assert chunk.features.dtype == np.float32
    assert chunk.features.flags.c_contiguous
    columns = np.split(chunk.features, np.cumsum(chunk.widths)[:-1], axis=1)
    return dict(zip(names, columns, strict=True))


def idle(engine):
    """Nothing reserved, nothing scheduled, nothing queued."""
    loop = engine._loop
    return loop.call(
        lambda: (
            len(loop.driver.capture.router) == 0
            and loop.driver._core.scheduler.get_num_unfinished_requests() == 0
            and len(loop._admission) == 0
        )
    )
