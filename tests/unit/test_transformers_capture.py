"""TransformersCapture on the toy: what it promises of rows, passes, failures and threads."""

import asyncio
import gc
import threading
import time

import numpy as np
import pytest
import torch

from wllm_ray.capture.coverage import ChunkCapture
from wllm_ray.capture.toy_model import HIDDEN, VOCAB, ToyModel
from wllm_ray.capture.transformers_capture import TransformersCapture
from wllm_ray.errors import CaptureError, InvalidInputError, NotOfferedError
from wllm_ray.records import CaptureTask, TokenRow
from wllm_ray.sites import HookSite

pytestmark = pytest.mark.requirement("C-13")

MAX_LEN = 40
POISON = 77


def toy(dtype=torch.float32):
    torch.manual_seed(5)
    return ToyModel().eval().to(dtype)


def open_capture(module, **options):
    sizes = {"num_layers": 3, "hidden_size": HIDDEN, "vocab_size": VOCAB, "max_model_len": MAX_LEN}
    return TransformersCapture(module, **sizes | options)


def rows_of(*lengths, seed=0):
    """Random prompts without the token that some tests poison."""
    random = np.random.default_rng(seed)
    return [random.integers(0, POISON, length).astype(np.int32) for length in lengths]


def task_of(prompts, *sites, position="last_prompt"):
    return CaptureTask(
        tuple(HookSite.parse(name) for name in sites or ("L2_resid_post",)),
        position,
        tuple(TokenRow(3 + 2 * number, ids) for number, ids in enumerate(prompts)),
    )


def hooks_on(module):
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())


def buffers_alive():
    gc.collect()
    return sum(type(one) is ChunkCapture for one in gc.get_objects())


def poison(module, action):
    """Do this in every pass that holds the token."""

    def before(_, args):
        if (args[0] == POISON).any():
            action()

    return module.register_forward_pre_hook(before)


@pytest.fixture(scope="module")
def module():
    return toy()


@pytest.fixture(scope="module")
def engine(module):
    with open_capture(module) as started:
        yield started


# Rows, positions, sites.


@pytest.mark.requirement("C-8")
def test_positions_are_those_of_one_row_alone(engine, module):
    prompts = rows_of(9, 1, 17)
    with torch.no_grad():
        streams = []
        for ids in prompts:
            hidden = module.embed_tokens(torch.from_numpy(ids)[None].long())
            for layer in module.layers:
                hidden = layer(hidden)
            streams.append(hidden[0].numpy())

    def features(position):
        chunk = engine.capture(task_of(prompts, position=position))
        assert chunk.failures == {}
        return chunk.lengths.tolist(), chunk.features

    expected = {
        "last_prompt": [stream[-1:] for stream in streams],
        "first": [stream[:1] for stream in streams],
        "all_prompt": streams,
        "mean_prompt": [stream.mean(axis=0, keepdims=True) for stream in streams],
        "index:-1,0": [stream[[-1, 0]] for stream in streams],
    }
    for position, rows in expected.items():
        lengths, found = features(position)
        assert lengths == [len(row) for row in rows]
        assert np.allclose(found, np.concatenate(rows), rtol=1e-5, atol=1e-5), position


@pytest.mark.requirement("C-16")
def test_rows_that_cannot_run_fail_and_the_others_do_not(engine):
    prompts = [
        *rows_of(MAX_LEN + 1, MAX_LEN),
        np.array([], np.int32),
        np.array([1, VOCAB], np.int32),
        *rows_of(2),
    ]
    chunk = engine.capture(task_of(prompts, position="index:0,5"))
    assert {index: failure.code for index, failure in chunk.failures.items()} == {
        3: "too_long",
        7: "zero_tokens",
        9: "token_out_of_vocabulary",
        11: "position_out_of_range",
    }
    assert chunk.row_index.tolist() == [3, 5, 7, 9, 11]
    assert chunk.lengths.tolist() == [0, 2, 0, 0, 0]


@pytest.mark.requirement("C-3")
def test_a_row_that_is_not_finite_fails_by_itself():
    module = toy()
    with open_capture(module) as engine:
        with torch.no_grad():
            module.embed_tokens.weight[POISON, 3] = float("nan")
        good, *_ = rows_of(6)
        chunk = engine.capture(task_of([good, np.array([POISON], np.int32)], "embed"))
        assert {index: failure.code for index, failure in chunk.failures.items()} == {
            5: "non_finite"
        }
        assert "position 0 of embed is not finite, first at hidden index 3" in str(chunk.failures)
        with pytest.raises(CaptureError, match=r"row 5 \(non_finite\): position 0 of embed"):
            engine.capture_device(task_of([good, np.array([POISON], np.int32)], "embed"))


@pytest.mark.requirement("C-9", "C-17")
def test_what_this_model_does_not_have_is_refused_before_anything_runs(engine):
    with pytest.raises(NotOfferedError, match=r"block 0 of ToyModel is 'mamba'.*attn_out: 2"):
        engine.capture(task_of(rows_of(4), "L0_attn_out"))
    with pytest.raises(InvalidInputError, match="layer 3 does not exist"):
        engine.capture(task_of(rows_of(4), "L3_resid_post"))
    with pytest.raises(NotOfferedError, match="position 'all_generated' is not captured"):
        engine.capture(task_of(rows_of(4), position="all_generated"))


# Passes.


@pytest.mark.requirement("C-6")
@pytest.mark.parametrize(
    ("site", "ran"),
    [
        ("embed", []),
        ("L0_resid_post", [0]),
        ("L1_moe_out", [0, 1]),
        ("L2_resid_pre", [0, 1]),
        ("L2_resid_mid", [0, 1, 2]),
        ("final_norm", [0, 1, 2, "norm"]),
    ],
)
def test_nothing_above_the_site_is_run(engine, module, site, ran):
    seen = []
    watched = [*enumerate(module.layers), ("norm", module.norm), ("head", module.lm_head)]
    handles = [
        part.register_forward_hook(lambda *_, name=name: seen.append(name))
        for name, part in watched
    ]
    try:
        chunk = engine.capture(task_of(rows_of(5, 8), site, position="all_prompt"))
    finally:
        for handle in handles:
            handle.remove()
    assert chunk.failures == {}
    assert seen == ran


@pytest.mark.requirement("C-6")
def test_cut_passes_give_the_bits_of_whole_ones(engine, module):
    with open_capture(module, depth_bounded=False) as whole:
        assert not whole.description.depth_bounded
        task = task_of(rows_of(5, 30, 8), "L1_resid_post", "L0_mamba_out", position="all_prompt")
        assert np.array_equal(whole.capture(task).features, engine.capture(task).features)


def test_rows_come_back_in_their_order_however_they_are_batched(module):
    prompts = rows_of(12, 3, 40, 3, 25, 1, 18)
    task = task_of(prompts, "L2_attn_out", "L2_attn_out_prelinear", position="all_prompt")
    found = []
    for sequences in (1, 2, 3, "auto"):
        with open_capture(module, sequences_per_call=sequences) as engine:
            chunk = engine.capture(task)
        assert chunk.lengths.tolist() == [len(ids) for ids in prompts]
        assert chunk.widths == (64, 96)
        found.append(chunk.features)
    for features in found[1:]:
        assert np.allclose(features, found[0], rtol=1e-4, atol=1e-5)


def test_a_loaded_module_is_given_back_as_it_was():
    module = toy()
    own = dict(vars(module))
    with open_capture(module) as engine:
        assert hooks_on(module) == 0
        engine.capture(task_of(rows_of(4), "L1_resid_post"))
        engine.capture_device(task_of(rows_of(4), "final_norm"))
        assert hooks_on(module) == 0
    assert vars(module) == own
    assert not module.training
    # It can still be trained on, with all that it cached.
    module(torch.zeros((1, 3), dtype=torch.long)).sum().backward()


@pytest.mark.requirement("C-11")
def test_a_model_whose_tokens_see_padding_is_found_by_the_selftest():
    module = toy()
    attention = module.layers[2].mixer
    attention.register_forward_hook(lambda _, __, output: output + output.mean(1, keepdim=True))
    with pytest.raises(CaptureError, match="alone and in a batch gives another") as caught:
        open_capture(module)
    assert caught.value.code == "self_test_failed"
    assert hooks_on(module) == 1
    # Where no row ever shares a pass there is nothing that could be seen.
    with open_capture(module, sequences_per_call=1, threads=1) as engine:
        assert engine.description.fingerprint.reproducibility == "bitwise"


# What goes wrong.


def out_of_memory():
    # Not asked of the system for long: no machine has an exbibyte.
    torch.empty(1 << 60, dtype=torch.uint8)


def out_of_reason():
    raise RuntimeError("the secret prompt")


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (out_of_memory, r"pass of 2 rows of up to 9 tokens does not fit into memory; lower"),
        (out_of_reason, r"the model raised RuntimeError in a forward pass of 2 rows"),
    ],
)
def test_a_pass_that_fails_fails_its_chunk_and_nothing_else(action, message, caplog):
    module = toy()
    with open_capture(module) as engine:
        handle = poison(module, action)
        good, bad = rows_of(5, 9)
        bad[4] = POISON
        with pytest.raises(CaptureError, match=message) as caught:
            engine.capture(task_of([good, bad]))
        assert caught.value.code == "capture_failed"
        assert "secret" not in caught.value.message
        assert "failed" in caplog.text
        assert buffers_alive() == 0
        assert hooks_on(module) == 1
        engine.check()
        assert engine.capture(task_of([good])).failures == {}
        handle.remove()
        assert engine.capture(task_of([good, bad])).failures == {}


def test_modules_that_cannot_be_run_as_they_are_are_refused():
    with pytest.raises(InvalidInputError, match=r"call module.eval\(\) first"):
        open_capture(toy().train())
    with pytest.raises(InvalidInputError, match="pass num_layers"):
        TransformersCapture(toy())
    with pytest.raises(InvalidInputError, match="has dtype float32, asked for was bfloat16"):
        open_capture(toy(), dtype="bfloat16")
    with pytest.raises(InvalidInputError, match="has dtype bfloat16, asked for was float32"):
        open_capture(toy(torch.bfloat16), precision="matched")
    with pytest.raises(InvalidInputError, match="is on cpu, asked for was cuda"):
        open_capture(toy(), device="cuda")
    spread = toy()
    spread.norm.to("meta")
    with pytest.raises(NotOfferedError, match="all parameters on one device"):
        open_capture(spread)
    with pytest.raises(CaptureError, match="no list of 5 decoder blocks"):
        open_capture(toy(), num_layers=5)


def test_other_weights_are_another_model():
    changed = toy()
    with torch.no_grad():
        changed.norm.weight[0] += 1e-6
    identities = []
    for module in (toy(), toy(), changed):
        with open_capture(module, selftest=False) as engine:
            identities.append(engine.description.model)
    assert identities[0] == identities[1]
    assert identities[0].name == identities[2].name == "ToyModel"
    assert identities[0].revision != identities[2].revision


# Threads.


class Gate:
    """Holds passes in the model until it is opened, and counts them."""

    def __init__(self, module):
        self.passes = 0
        self.entered, self.open = threading.Event(), threading.Event()
        module.register_forward_pre_hook(self._before)

    def _before(self, *_):
        self.passes += 1
        self.entered.set()
        assert self.open.wait(30)

    async def reached(self):
        assert await asyncio.to_thread(self.entered.wait, 30)


@pytest.fixture
def gated():
    """An engine whose next pass waits: one row in each pass."""
    module = toy()
    with open_capture(module, sequences_per_call=1, selftest=False, progress_limit_s=0.2) as engine:
        gate = Gate(module)
        try:
            yield engine, gate
        finally:
            gate.open.set()


@pytest.mark.requirement("R-7")
async def test_cancelling_stops_after_the_pass_and_frees_the_buffers(gated):
    engine, gate = gated
    work = asyncio.ensure_future(engine.capture_async(task_of(rows_of(5, 6, 7, 8))))
    waiting = asyncio.ensure_future(engine.capture_async(task_of(rows_of(5))))
    # The event loop is free while the model runs.
    await gate.reached()
    for task in (work, waiting):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    gate.open.set()
    chunk = await engine.capture_async(task_of(rows_of(4)))
    assert chunk.failures == {}
    assert gate.passes == 2
    del chunk
    assert buffers_alive() == 0


async def test_closing_fails_what_is_in_flight(gated):
    engine, gate = gated
    running = asyncio.ensure_future(engine.capture_async(task_of(rows_of(5, 6))))
    waiting = asyncio.ensure_future(engine.capture_async(task_of(rows_of(5))))
    await gate.reached()
    closing = asyncio.ensure_future(asyncio.to_thread(engine.close))
    assert await asyncio.to_thread(engine._thread.closing.wait, 30)
    gate.open.set()
    for task in (running, waiting):
        with pytest.raises(CaptureError, match="the engine is closed") as caught:
            await task
        assert caught.value.code == "engine_dead"
    await closing
    assert gate.passes == 1
    with pytest.raises(CaptureError, match="the engine is closed"):
        engine.check()
    with pytest.raises(CaptureError, match="the engine is closed"):
        engine.capture(task_of(rows_of(5)))
    engine.close()


async def test_a_pass_that_hangs_is_told_by_check(gated):
    engine, gate = gated
    engine.check()
    work = asyncio.ensure_future(engine.capture_async(task_of(rows_of(5))))
    await gate.reached()
    time.sleep(0.3)  # noqa: ASYNC251 (the pass must be over its limit)
    with pytest.raises(CaptureError, match=r"one forward pass has been running for over 0\.2 s"):
        engine.check()
    gate.open.set()
    await work
    engine.check()


# On the device.


@pytest.mark.requirement("P-3")
def test_device_tensors_hold_what_capture_returns_in_the_models_own_dtype():
    module = toy(torch.bfloat16)
    with open_capture(module) as engine:
        for position in ("last_prompt", "all_prompt", "index:-1,0"):
            task = task_of(
                rows_of(9, 2, 17), "L2_attn_out_prelinear", "L0_resid_post", position=position
            )
            chunk = engine.capture(task)
            found = engine.capture_device(task)
            assert tuple(found) == task.sites
            assert {one.dtype for one in found.values()} == {torch.bfloat16}
            beside = torch.cat(list(found.values()), dim=1).float().numpy()
            assert np.array_equal(beside, chunk.features), position
        mean = task_of(rows_of(9, 2, 17), position="mean_prompt")
        (averaged,) = engine.capture_device(mean).values()
        assert averaged.dtype == torch.float32
        assert np.allclose(averaged.numpy(), engine.capture(mean).features, rtol=1e-6, atol=1e-6)


@pytest.mark.requirement("P-3")
def test_device_tensors_belong_to_the_caller(engine, module):
    task = task_of(rows_of(6, 4), "L2_resid_post")
    before = engine.capture(task).features
    (found,) = engine.capture_device(task).values()
    probe = torch.nn.Linear(HIDDEN, 1)
    probe(found).sum().backward()
    assert probe.weight.grad is not None
    found.zero_()
    assert np.array_equal(engine.capture(task).features, before)


@pytest.mark.requirement("P-3")
def test_no_rows_are_an_empty_tensor_of_the_models_dtype():
    with open_capture(toy(torch.bfloat16), selftest=False) as engine:
        for position, dtype in (("last_prompt", torch.bfloat16), ("mean_prompt", torch.float32)):
            (found,) = engine.capture_device(task_of([], position=position)).values()
            assert (found.shape, found.dtype) == ((0, HIDDEN), dtype)


@pytest.mark.requirement("C-16")
def test_a_row_that_cannot_run_is_an_error_where_there_is_no_place_for_failures(engine):
    with pytest.raises(
        InvalidInputError, match=r"row 5: the row has 41 tokens, the model takes 40"
    ):
        engine.capture_device(task_of(rows_of(3, MAX_LEN + 1)))
