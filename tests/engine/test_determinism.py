"""The same rows give the same bytes, however they are put into chunks and whatever runs beside."""

import asyncio

import numpy as np
import pytest
from conftest import prompts_of, relative_l2, task_of
from tiny_models import MAX_LEN

pytestmark = pytest.mark.requirement("D-3", "C-2")

LAYERS = (1, 3)
TIGHT = 1e-4


def in_chunks(engine, prompts, size):
    parts = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    return np.concatenate([engine.capture(task_of(part, LAYERS)).features for part in parts])


def shuffled(engine, prompts):
    order = np.random.default_rng(6).permutation(len(prompts))
    features = engine.capture(task_of([prompts[i] for i in order], LAYERS)).features
    return features[np.argsort(order)]


async def beside_another_job(engine, prompts):
    """Chunks of 9 in flight together, and as many of a job with other prompts and layers."""
    others = prompts_of([len(prompt) // 2 + 1 for prompt in prompts], seed=99)
    parts = range(0, len(prompts), 9)
    ours = [engine.capture_async(task_of(prompts[i : i + 9], LAYERS)) for i in parts]
    theirs = [engine.capture_async(task_of(others[i : i + 9], (0,))) for i in parts]
    chunks = await asyncio.gather(*(one for pair in zip(theirs, ours, strict=True) for one in pair))
    return np.concatenate([chunk.features for chunk in chunks[1::2]])


async def assert_same_bytes_every_way(engine, prompts):
    assert engine.description.fingerprint.reproducibility == "bitwise"
    expected = in_chunks(engine, prompts, 64)
    assert np.array_equal(in_chunks(engine, prompts, 7), expected)
    assert np.array_equal(in_chunks(engine, prompts, 1), expected)
    assert np.array_equal(shuffled(engine, prompts), expected)
    assert np.array_equal(await beside_another_job(engine, prompts), expected)
    return expected


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3", "float32"),
        ("gemma3", "bfloat16"),
        pytest.param("qwen3", "bfloat16", marks=pytest.mark.slow),
        pytest.param("gemma3", "float32", marks=pytest.mark.slow),
    ],
)
async def test_a_rows_bytes_do_not_depend_on_its_company(family, dtype, open_engine, reference):
    prompts = prompts_of(np.random.default_rng(5).integers(1, 301, 40).tolist(), seed=5)
    with open_engine(family, dtype=dtype) as engine:
        found = await assert_same_bytes_every_way(engine, prompts)
    if dtype == "float32":
        expected = reference(family).all_rows(prompts)[:, LAYERS]
        assert relative_l2(found.reshape(expected.shape), expected).max() <= TIGHT


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
async def test_a_long_job_of_long_rows(family, dtype, open_engine):
    prompts = prompts_of(np.random.default_rng(8).integers(5, 601, 300).tolist(), seed=8)
    longer = {"max_model_len": 2 * MAX_LEN, "prefill_split_tokens": 256, "max_num_seqs": 64}
    override = {"max_position_embeddings": 2 * MAX_LEN}
    with open_engine(family, dtype=dtype, hf_overrides=override, **longer) as engine:
        await assert_same_bytes_every_way(engine, prompts)
