"""Engines in this process as people use them: a path, texts, and Transformers as the truth."""

import asyncio
import inspect

import numpy as np
import pytest
import torch
from conftest import relative_l2
from tiny_models import HIDDEN
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.fakes import LocalBackend
from wllm_ray import TransformersEngine, VLLMEngine, load_dataset
from wllm_ray.capture.model_files import resolve_model
from wllm_ray.capture.tokenizer import TransformersTokenizer
from wllm_ray.capture.transformers_capture import TransformersCapture
from wllm_ray.capture.vllm_capture import VLLMCapture
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.engines.transformers import TransformersOptions
from wllm_ray.engines.vllm import VLLMOptions
from wllm_ray.errors import InvalidInputError, NotFoundError, NotOfferedError
from wllm_ray.extraction import ExtractionService
from wllm_ray.schema import ActivationRequest, StorageOptions

SPLIT = 64
PROMPTS = ["The sea is wide.", "a", "The long way home leads past the old mill. " * 6]
SITES = ["embed", "L0_resid_post", "L2_resid_post"]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def path(tiny_model):
    return tiny_model("qwen3")


def open_vllm(path, **asked):
    return VLLMEngine(path, prefill_split_tokens=SPLIT, max_num_seqs=8, **asked)


def open_transformers(path, **asked):
    return TransformersEngine(path, device="cpu", **asked)


@pytest.fixture(scope="module", params=[open_vllm, open_transformers])
def opened(request, path):
    with request.param(path, sites=SITES, position="all_prompt") as engine:
        yield engine


@pytest.fixture
def engine(opened):
    opened.set_active_sites(SITES, "all_prompt")
    opened.set_sequences_per_call("auto")
    return opened


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


def expect_same(engine, found, expected):
    """To the bit where the engine is of that class, and within its own bound otherwise."""
    assert found.shape == expected.shape
    if engine.description.fingerprint.reproducibility == "bitwise":
        np.testing.assert_array_equal(found, expected)
    else:
        assert relative_l2(found, expected).max() < 1e-5


@pytest.mark.requirement("P-3", "C-8", "C-13")
def test_texts_by_path_give_what_transformers_gives(engine, truth):
    found = engine.extract(PROMPTS)
    assert engine.description.selftest.passed
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
def test_results_do_not_depend_on_sequences_per_call(engine, sequences):
    whole = engine.extract(PROMPTS)
    engine.set_sequences_per_call(sequences)
    expect_same(engine, engine.extract(PROMPTS).features, whole.features)


@pytest.mark.requirement("P-3")
def test_sites_change_without_a_reload(engine):
    low_level = engine._engine
    whole = engine.extract(PROMPTS)
    engine.set_active_sites("L2_resid_post", "last_prompt")
    found = engine.extract(PROMPTS)
    expect_same(engine, found.features, whole.site("L2_resid_post")[whole.offsets[1:] - 1])
    assert engine._engine is low_level
    with pytest.raises(InvalidInputError, match="4 blocks"):
        engine.set_active_sites("L4_resid_post")


def is_busy(engine):
    """Whether the low-level engine holds rows."""
    if isinstance(engine, TransformersEngine):
        return engine._engine._driver.pass_started is not None
    loop = engine._engine._loop
    return loop.call(lambda: len(loop.driver.capture.router)) > 0


@pytest.mark.requirement("P-3", "R-7")
async def test_cancelling_frees_what_the_engine_holds(opened):
    task = asyncio.create_task(opened.extract_async(PROMPTS * 200, SITES, "all_prompt"))
    while not is_busy(opened):  # noqa: ASYNC110 (no event of ours says so)
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(await opened.extract_async(PROMPTS)) == 3
    assert not is_busy(opened)


@pytest.mark.requirement("P-3", "D-3")
async def test_a_stream_writes_the_dataset_that_an_application_writes(engine, path, tmp_path):
    rows = [{"id": f"r{n}", "prompt": text} for n, text in enumerate([*PROMPTS, "", *PROMPTS])]
    engine.set_sequences_per_call(3)
    stream = engine.stream_to_disk(
        rows, tmp_path / "here", storage=StorageOptions(rows_per_shard=3)
    )
    receipts = await asyncio.to_thread(list, stream)
    assert [one.shard for one in receipts] == [0, 1, 2]
    dataset = load_dataset(tmp_path / "here", stream.spec.dataset_id, verify="full")
    in_memory = await engine.extract_async(rows)
    expect_same(engine, dataset.features, in_memory.features)
    assert dataset.failures["r3"] == in_memory.failures["r3"]

    served = open_store(tmp_path / "there")
    service = ExtractionService(
        LocalBackend(engine._engine, served),
        TransformersTokenizer(str(path), resolve_model(str(path))),
        store=served,
    )
    service.description = engine.description
    request = ActivationRequest(
        model=engine.description.served_model_name,
        rows=rows,
        sites=SITES,
        position="all_prompt",
        persistence="dataset",
        rows_per_shard=3,
        batch_size=3,
    )
    answer = await service.extract_dataset(request)
    assert answer.dataset.content_sha256 == stream.manifest.content_sha256


@pytest.mark.requirement("P-3", "C-15")
def test_a_measured_plan_gives_the_same(engine):
    whole = engine.extract(PROMPTS)
    measured = engine.measure_batches(budget_bytes=64 * 1024 * 1024)
    assert measured.profile.pass_tokens == (SPLIT if isinstance(engine, VLLMEngine) else None)
    expect_same(engine, engine.extract(PROMPTS).features, whole.features)


@pytest.mark.requirement("P-3", "C-13")
def test_on_the_device_are_the_same_values(path):
    with open_transformers(path, sites=["embed", "L2_attn_out"]) as engine:
        on_host = engine.extract([*PROMPTS, ""], position="index:0,-1")
        engine.set_sequences_per_call(2)
        found = engine.extract_device([*PROMPTS, ""], position="index:0,-1")
        assert found.features.shape == (6, 2, HIDDEN)
        expect_same(engine, found.features.numpy(), on_host.features)
        expect_same(engine, found.site("L2_attn_out").numpy(), on_host.site("L2_attn_out"))
        assert (found.row_ids, found.failures) == (on_host.row_ids, on_host.failures)
        assert found.offsets.tolist() == [0, 2, 4, 6]
        nothing = engine.extract_device([""])
        assert (nothing.features.shape, nothing.features.dtype) == ((0, 2, HIDDEN), torch.float32)


@pytest.mark.requirement("P-3", "C-13")
def test_a_loaded_module_is_run_as_it_is(path):
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    with torch.no_grad():
        module.model.layers[0].mlp.down_proj.weight *= 1.5
    seen = []
    handle = module.model.layers[1].mlp.register_forward_hook(lambda *call: seen.append(call[2]))
    ids = tokenizer(PROMPTS[0])["input_ids"]
    with torch.no_grad():
        module(torch.tensor([ids]))
    handle.remove()
    expected = seen[0][0, -1:].numpy()
    with TransformersEngine(module, "L1_mlp_out", tokenizer=tokenizer) as engine:
        assert relative_l2(engine.extract(PROMPTS[:1]).features, expected).max() < TOLERANCE
        revision = engine.description.model.revision
    with TransformersEngine(module, "L1_mlp_out") as engine:
        assert relative_l2(engine.extract([ids]).features, expected).max() < TOLERANCE
        with pytest.raises(InvalidInputError, match="tokenizer="):
            engine.extract(PROMPTS)
        assert engine.description.model.revision == revision
    assert revision != resolve_model(str(path)).revision


@pytest.mark.requirement("C-17")
@pytest.mark.parametrize("kind", [VLLMEngine, TransformersEngine])
@pytest.mark.parametrize(
    ("options", "refusal", "message"),
    [
        ({"tensor_parallel_size": 2}, NotOfferedError, "replicas"),
        ({"enable_lora": True}, NotOfferedError, "merge"),
        ({"speculative_config": {}}, NotOfferedError, "speculative"),
        ({"output_attentions": True}, NotOfferedError, "attn_out"),
        ({"max_model_length": 8}, InvalidInputError, "max_model_len"),
        ({"sites": "L0_nothing"}, InvalidInputError, "nothing"),
        ({"position": "nowhere"}, InvalidInputError, "nowhere"),
    ],
)
def test_what_cannot_be_is_refused_before_the_model_is_loaded(
    kind, path, options, refusal, message
):
    with pytest.raises(refusal, match=message):
        kind(path, **options)


@pytest.mark.requirement("P-3")
@pytest.mark.parametrize(
    ("low_level", "options"),
    [(VLLMCapture, VLLMOptions), (TransformersCapture, TransformersOptions)],
)
def test_every_option_of_the_low_level_engine_can_be_given(low_level, options):
    found_by_itself = {
        "self", "model", "model_identity", "tokenizer_identity", "trust_remote_code",
    }  # fmt: skip
    taken = set(inspect.signature(low_level.__init__).parameters) - found_by_itself
    assert set(options.__annotations__) == taken


@pytest.mark.requirement("P-3")
@pytest.mark.parametrize("kind", [VLLMEngine, TransformersEngine])
def test_a_model_that_is_not_there_is_told(kind, tmp_path):
    with pytest.raises(NotFoundError, match=r"config\.json"):
        kind(tmp_path)
