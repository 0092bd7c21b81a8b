"""Engines in this process as people use them: a path, texts, and Transformers as the truth."""

import asyncio

import numpy as np
import pytest
import torch
from conftest import relative_l2
from tiny_models import HIDDEN
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.fakes import LocalBackend
from wllm_ray import VLLMEngine, load_dataset
from wllm_ray.capture.model_files import resolve_model
from wllm_ray.capture.tokenizer import TransformersTokenizer
from wllm_ray.dataset.store import open_store
from wllm_ray.errors import InvalidInputError, NotFoundError, NotOfferedError
from wllm_ray.extraction import ExtractionService
from wllm_ray.schema import ActivationRequest

SPLIT = 64
PROMPTS = ["The sea is wide.", "a", "The long way home leads past the old mill. " * 6]
SITES = ["embed", "L0_resid_post", "L2_resid_post"]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def path(tiny_model):
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def vllm_engine(path):
    with VLLMEngine(
        path, SITES, position="all_prompt", prefill_split_tokens=SPLIT, max_num_seqs=8
    ) as engine:
        yield engine


@pytest.fixture(autouse=True)
def as_opened(vllm_engine):
    vllm_engine.set_active_sites(SITES, "all_prompt")
    vllm_engine.set_sequences_per_call("auto")


@pytest.fixture(scope="module")
def truth(path):
    """Prompt → (ids, [tokens, 3, hidden]): ``hidden_states`` is apart by one from layers."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)

    def read(prompt):
        ids = tokenizer(prompt)["input_ids"]
        with torch.no_grad():
            states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        return ids, torch.stack([states[0][0], states[1][0], states[3][0]], dim=1).numpy()

    return read


@pytest.mark.requirement("P-3", "C-8")
def test_texts_by_path_give_what_transformers_gives(vllm_engine, truth):
    found = vllm_engine.extract(PROMPTS)
    assert vllm_engine.description.selftest.passed
    for number, prompt in enumerate(PROMPTS):
        ids, expected = truth(prompt)
        rows = found.features[found.offsets[number] : found.offsets[number + 1]]
        assert found.token_ids[number].tolist() == ids
        assert rows.shape == expected.shape == (len(ids), 3, HIDDEN)
        assert relative_l2(rows, expected).max() < TOLERANCE
        neighbours = np.roll(expected, 1, axis=1)
        assert relative_l2(rows, neighbours).min() > 1e-2
    assert len(found.token_ids[2]) > SPLIT, "one prompt is run in prefill chunks"


@pytest.mark.requirement("P-3", "D-3")
@pytest.mark.parametrize("sequences", [1, 2, "auto"])
def test_no_bit_depends_on_sequences_per_call(vllm_engine, sequences):
    whole = vllm_engine.extract(PROMPTS)
    vllm_engine.set_sequences_per_call(sequences)
    np.testing.assert_array_equal(vllm_engine.extract(PROMPTS).features, whole.features)


@pytest.mark.requirement("P-3")
def test_sites_change_without_a_reload(vllm_engine):
    low_level = vllm_engine._engine
    whole = vllm_engine.extract(PROMPTS)
    vllm_engine.set_active_sites("L2_resid_post", "last_prompt")
    found = vllm_engine.extract(PROMPTS)
    np.testing.assert_array_equal(
        found.features, whole.site("L2_resid_post")[whole.offsets[1:] - 1]
    )
    assert vllm_engine._engine is low_level
    with pytest.raises(InvalidInputError, match="4 blocks"):
        vllm_engine.set_active_sites("L4_resid_post")


@pytest.mark.requirement("P-3", "R-7")
async def test_cancelling_frees_what_the_engine_holds(vllm_engine):
    loop = vllm_engine._engine._loop
    task = asyncio.create_task(vllm_engine.extract_async(PROMPTS * 200))
    while not loop.call(lambda: len(loop.driver.capture.router)):  # noqa: ASYNC110 (not ours)
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert loop.call(lambda: len(loop.driver.capture.router)) == 0
    assert len(await vllm_engine.extract_async(PROMPTS)) == 3


@pytest.mark.requirement("P-3", "D-3")
async def test_a_stream_writes_the_dataset_that_an_application_writes(vllm_engine, path, tmp_path):
    rows = [{"id": f"r{n}", "prompt": text} for n, text in enumerate([*PROMPTS, "", *PROMPTS])]
    stream = vllm_engine.stream_to_disk(rows, tmp_path / "here", rows_per_shard=3)
    receipts = await asyncio.to_thread(list, stream)
    assert [one.shard for one in receipts] == [0, 1, 2]
    dataset = load_dataset(tmp_path / "here", stream.spec.dataset_id, verify="full")
    in_memory = await vllm_engine.extract_async(rows)
    np.testing.assert_array_equal(dataset.features, in_memory.features)
    assert dataset.failures["r3"] == in_memory.failures["r3"]

    served = open_store(tmp_path / "there")
    service = ExtractionService(
        LocalBackend(vllm_engine._engine, served),
        TransformersTokenizer(str(path), resolve_model(str(path))),
        store=served,
    )
    service.description = vllm_engine.description
    request = ActivationRequest(
        model=vllm_engine.description.served_model_name,
        rows=rows,
        sites=SITES,
        position="all_prompt",
        persistence="dataset",
        rows_per_shard=3,
        batch_size=2,
    )
    answer = await service.extract_dataset(request)
    assert answer.dataset.content_sha256 == stream.manifest.content_sha256


@pytest.mark.requirement("P-3", "C-15")
def test_a_measured_plan_gives_the_same_bits(vllm_engine):
    whole = vllm_engine.extract(PROMPTS)
    measured = vllm_engine.measure_batches(budget_bytes=64 * 1024 * 1024)
    assert measured.profile.pass_tokens == SPLIT
    np.testing.assert_array_equal(vllm_engine.extract(PROMPTS).features, whole.features)


@pytest.mark.requirement("C-17")
@pytest.mark.parametrize(
    ("options", "refusal", "message"),
    [
        ({"tensor_parallel_size": 2}, NotOfferedError, "replicas"),
        ({"enable_lora": True}, NotOfferedError, "merge"),
        ({"speculative_config": {}}, NotOfferedError, "speculative"),
        ({"output_attentions": True}, NotOfferedError, "attn_out"),
        ({"vllm_args": {"enable_lora": True}}, NotOfferedError, "enable_lora"),
        ({"max_model_length": 8}, InvalidInputError, "max_model_len"),
        ({"sites": "L0_nothing"}, InvalidInputError, "nothing"),
        ({"position": "nowhere"}, InvalidInputError, "nowhere"),
    ],
)
def test_what_cannot_be_is_refused_before_the_model_is_loaded(path, options, refusal, message):
    with pytest.raises(refusal, match=message):
        VLLMEngine(path, **options)


@pytest.mark.requirement("P-3")
def test_a_model_that_is_not_there_is_told(tmp_path):
    with pytest.raises(NotFoundError, match=r"config\.json"):
        VLLMEngine(tmp_path)
