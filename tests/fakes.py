"""An engine, a tokenizer and a whole application without a model.

The engine's features are a pure function of the token ids up to each position, so any two ways to
the same dataset must agree to the bit. Its model has blocks of two types, and a kind of site whose
width differs from the others' and from block to block. Everything else of an application is real:
service, coordinator, store, HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import uvicorn
from fastapi import FastAPI
from numpy.typing import NDArray

from wllm_ray.dataset.format.manifest import DatasetSpec, Manifest
from wllm_ray.dataset.stores.store import Store
from wllm_ray.dataset.writing.writer import StageResult, commit_manifest, stage_shard
from wllm_ray.extraction import ExtractionLimits, ExtractionService
from wllm_ray.http.api import build_api
from wllm_ray.offered import site_widths
from wllm_ray.plan import Shard
from wllm_ray.positions import is_reduced, resolve
from wllm_ray.records import (
    CapturedChunk,
    CaptureTask,
    EngineDescription,
    Fingerprint,
    ModelIdentity,
    RowFailure,
    RowRecord,
    SelfTestReport,
    SiteSupport,
    TokenizerIdentity,
    TokenRow,
)
from wllm_ray.sites import HookSite
from wllm_ray.tokens import ChatTemplateRefusedError

MODEL = "fake-model"
REVISION = "sha256:" + "1" * 64
VOCAB_SIZE = 256
MAX_MODEL_LEN = 64
NUM_LAYERS = 4
HIDDEN_SIZE = 8
LAYER_TYPES = ("attention + mlp", "attention + mlp", "mamba", "attention + mlp")
ATTENTION_LAYERS = (0, 1, 3)
SITES = (
    SiteSupport(kind="resid_pre", layers=(0, 1, 2, 3), width=HIDDEN_SIZE),
    SiteSupport(kind="resid_mid", layers=ATTENTION_LAYERS, width=HIDDEN_SIZE),
    SiteSupport(kind="resid_post", layers=(0, 1, 2, 3), width=HIDDEN_SIZE),
    SiteSupport(kind="attn_out", layers=ATTENTION_LAYERS, width=HIDDEN_SIZE),
    SiteSupport(kind="attn_out_prelinear", layers=(0, 1), width=12),
    SiteSupport(kind="attn_out_prelinear", layers=(3,), width=16),
    SiteSupport(kind="mlp_out", layers=ATTENTION_LAYERS, width=HIDDEN_SIZE),
    SiteSupport(kind="mamba_out", layers=(2,), width=HIDDEN_SIZE),
    SiteSupport(kind="embed", layers=None, width=HIDDEN_SIZE),
    SiteSupport(kind="final_norm", layers=None, width=HIDDEN_SIZE),
)
POSITIONS = ("last_prompt", "first", "all_prompt", "mean_prompt", "index")
# A row with this token kills the engines that tests poison.
POISON = 77

Fault = Callable[[TokenRow], RowFailure | None]


class FakeTokenizer:
    """UTF-8 bytes as ids; NUL bytes are dropped, so that a prompt can come to nothing."""

    def __init__(self, *, has_template: bool = True) -> None:
        self.identity = TokenizerIdentity(
            name=MODEL,
            revision=REVISION,
            chat_template_sha256="2" * 64 if has_template else None,
        )

    def encode_prompts(self, prompts: Sequence[str]) -> list[list[int]]:
        return [[byte for byte in prompt.encode() if byte] for prompt in prompts]

    def encode_messages(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        known = {"system": "S", "user": "U", "assistant": "A"}
        try:
            text = "".join(f"<{known[one['role']]}>{one['content']}" for one in messages)
        except KeyError as error:
            raise ChatTemplateRefusedError from error
        return list((text + "<A>").encode())


def fake_activation(token_ids: NDArray[np.int32], site: HookSite, width: int) -> Any:
    """[width] float32: the site at the last of these tokens, a pure function of all of them."""
    seed = hashlib.sha256(token_ids.astype("<i4").tobytes() + str(site).encode()).digest()
    return np.random.default_rng(list(seed)).standard_normal(width, dtype=np.float32)


def fake_features(
    token_ids: NDArray[np.int32], sites: Sequence[HookSite], position: str = "last_prompt"
) -> NDArray[np.float32]:
    """[feature rows, sum of the sites' widths] float32 of one row."""
    widths = site_widths(fake_description(), sites)
    rows = [
        np.concatenate(
            [
                fake_activation(token_ids[: place + 1], site, width)
                for site, width in zip(sites, widths, strict=True)
            ]
        )
        for place in resolve(position, len(token_ids))
    ]
    features = np.stack(rows)
    return features.mean(axis=0, keepdims=True) if is_reduced(position) else features


def fake_description(**changes: Any) -> EngineDescription:
    """What the fake engine says of itself; keyword arguments replace fields."""
    fields: dict[str, Any] = {
        "served_model_name": MODEL,
        "model": ModelIdentity(name=MODEL, revision=REVISION),
        "tokenizer": FakeTokenizer().identity,
        "architecture": "FakeForCausalLM",
        "num_layers": NUM_LAYERS,
        "hidden_size": HIDDEN_SIZE,
        "vocab_size": VOCAB_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "layer_types": LAYER_TYPES,
        "sites": SITES,
        "positions": POSITIONS,
        "depth_bounded": True,
        "fingerprint": Fingerprint(
            model_revision=REVISION,
            tokenizer_revision=REVISION,
            engine="fake",
            engine_version="1",
            engine_dtype="float32",
            precision="native",
            device="none",
            threads=1,
            prefill_split_tokens=64,
            reproducibility="bitwise",
        ),
        "versions": {"fake": "1"},
        "selftest": SelfTestReport(
            passed=True,
            checks={"hooks": "all fired"},
            reproducibility="bitwise",
            measured_relative_l2=0.0,
            prompt_lengths=(8,),
            residual="fake",
            seconds=0.0,
        ),
    }
    return EngineDescription(**fields | changes)


@dataclass
class FakeEngine:
    """Implements :class:`wllm_ray.capture.protocol.Engine`, and counts what it ran.

    Attributes:
        fault: Row → why it fails; asked on every attempt.
        delay_s: How long a chunk takes.
        captured: Token ids → how often a row with these was captured.
        tasks: How many chunks were run.
        running: How many chunks are being run.
        cancelled: How many were given up.
    """

    description: EngineDescription = field(default_factory=fake_description)
    fault: Fault = lambda _row: None
    delay_s: float = 0.0
    captured: Counter[tuple[int, ...]] = field(default_factory=Counter)
    tasks: int = 0
    running: int = 0
    cancelled: int = 0

    async def capture_async(self, task: CaptureTask) -> CapturedChunk:
        self.running += 1
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        return self.capture(task)

    def capture(self, task: CaptureTask) -> CapturedChunk:
        self.tasks += 1
        failures = {row.index: why for row in task.rows if (why := self.fault(row))}
        good = [row for row in task.rows if row.index not in failures]
        self.captured.update(tuple(row.token_ids.tolist()) for row in task.rows)
        features = {
            row.index: fake_features(row.token_ids, task.sites, task.position) for row in good
        }
        widths = site_widths(self.description, task.sites)
        return CapturedChunk(
            row_index=np.array([row.index for row in task.rows], np.int64),
            lengths=np.array([len(features.get(row.index, ())) for row in task.rows], np.int64),
            features=np.concatenate([np.empty((0, sum(widths)), np.float32), *features.values()]),
            widths=widths,
            failures=failures,
            description=self.description,
            timings={"forward_s": 0.0},
        )

    def check(self) -> None:
        """Always alive."""

    def close(self) -> None:
        """Nothing to free."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def rivalled(stage: Callable[..., StageResult], differs: Container[int]) -> Any:
    """A ``stage_shard`` before which another attempt writes each shard.

    Args:
        stage: The real one.
        differs: The shards of which the other attempt has measured other numbers.
    """

    def staged(
        store: Store,
        spec: DatasetSpec,
        shard: int,
        rows: Sequence[RowRecord],
        chunks: Sequence[CapturedChunk],
    ) -> StageResult:
        more = np.float32(shard in differs)
        others = [replace(chunk, features=chunk.features + more) for chunk in chunks]
        stage(store, spec, shard, rows, others)
        return stage(store, spec, shard, rows, chunks)

    return staged


class LocalBackend:
    """Implements :class:`wllm_ray.backend.Backend` in this process."""

    def __init__(self, engine: FakeEngine, store: Store | None) -> None:
        self.engine = engine
        self._store = store

    async def capture(self, task: CaptureTask, *, alone: bool = False) -> CapturedChunk:
        return await self.engine.capture_async(task)

    async def fetch(self, payload: CapturedChunk) -> CapturedChunk:
        return payload

    async def stage(
        self, spec: DatasetSpec, shard: Shard, payloads: Sequence[CapturedChunk]
    ) -> StageResult:
        assert self._store is not None
        return await asyncio.to_thread(
            stage_shard, self._store, spec, shard.index, shard.rows, payloads
        )

    async def commit(self, dataset_id: str) -> Manifest:
        assert self._store is not None
        return await asyncio.to_thread(commit_manifest, self._store, dataset_id)


class Application:
    """A whole application over a fake engine; an ASGI app that records and can misbehave.

    Attributes:
        engine: Runs the chunks.
        service: As in a deployment; set ``service.description`` to None for "not ready".
        requests: (method, path) of every request.
        before: Answers asked for by tests: called with each request's (method, path), returns
            (status, headers, body) to answer in the application's place, or None.
    """

    def __init__(
        self,
        store: Store | None = None,
        *,
        engine: FakeEngine | None = None,
        tokenizer: FakeTokenizer | None = None,
        limits: ExtractionLimits | None = None,
        **api_options: Any,
    ) -> None:
        self.engine = engine or FakeEngine()
        self.service = ExtractionService(
            LocalBackend(self.engine, store),
            tokenizer or FakeTokenizer(),
            store=store,
            limits=limits,
        )
        self.service.description = self.engine.description
        self.requests: list[tuple[str, str]] = []
        self.before: Callable[[str, str], tuple[int, dict[str, str], bytes] | None] = (
            lambda _method, _path: None
        )
        self.api: FastAPI = build_api(
            self.service, is_ready=lambda: self.service.description is not None, **api_options
        )

    async def __call__(
        self,
        scope: dict[str, Any],
        receive: Callable[[], Awaitable[dict[str, Any]]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        if scope["type"] == "http":
            self.requests.append((scope["method"], scope["path"]))
            canned = self.before(scope["method"], scope["path"])
            if canned is not None:
                status, headers, body = canned
                raw = [(name.encode(), value.encode()) for name, value in headers.items()]
                await send({"type": "http.response.start", "status": status, "headers": raw})
                await send({"type": "http.response.body", "body": body})
                return
        await self.api(scope, receive, send)


@contextlib.contextmanager
def serving(app: Any, port: int | None = None) -> Iterator[str]:
    """Serve an ASGI app on a loopback port, in a thread; yields its base URL."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port or 0))
    listener.listen(128)  # who calls before the server's thread has begun waits in the backlog
    config = uvicorn.Config(app, log_level="error", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listener.close()
