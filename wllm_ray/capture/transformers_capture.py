"""A model of Transformers, or any decoder module, in this process, capturing chunks of rows.

The reference for vLLM, and what captures where there is none: the same sites, found and proven in
the same way. Rows of like length run together, padded on the right; none is split or truncated.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import nn

from wllm_ray.capture.coverage import ChunkCapture, RowsWanted, SitesWanted
from wllm_ray.capture.device_rows import DeviceChunk
from wllm_ray.capture.model_thread import ModelThread
from wllm_ray.capture.precision import Precision
from wllm_ray.capture.proof import Names
from wllm_ray.capture.request import check_rows, check_task, chunk_of
from wllm_ray.capture.transformers_batches import SequencesPerCall, batch_limits
from wllm_ray.capture.transformers_driver import TransformersDriver
from wllm_ray.capture.transformers_model import ModelOptions, identity_of, load_model
from wllm_ray.capture.transformers_proof import describe, prove
from wllm_ray.errors import CaptureError, InvalidInputError
from wllm_ray.records import (
    CapturedChunk,
    CaptureTask,
    EngineDescription,
    ModelIdentity,
    RowFailure,
    TokenizerIdentity,
)
from wllm_ray.sites import HookSite

__all__ = ["TransformersCapture"]

T = TypeVar("T")

_NO_TOKENIZER = TokenizerIdentity(
    name="none: rows are token ids", revision="none", chat_template_sha256=None
)


@dataclass(eq=False, slots=True)
class _Job:
    """A task on its way through the engine; what cannot run has failed already."""

    task: CaptureTask
    wanted: SitesWanted
    rows: list[RowsWanted]
    failures: dict[int, RowFailure]
    given_up: threading.Event = field(default_factory=threading.Event)
    submitted: float = field(default_factory=time.monotonic)

    @property
    def ids(self) -> list[str]:
        return [f"row-{row.index}" for row in self.rows]


class TransformersCapture:
    """Captures hook sites with Transformers, in this process and on a thread of its own.

    A loaded module is run as it is and not changed; hooks are on it only while a chunk runs. Do not
    train it or move it meanwhile.

    Args:
        model: A local directory, a name on a hub, or a loaded decoder: a module that takes token
            ids [B, T] first, holds its blocks in one ``ModuleList`` and is in evaluation mode.
        model_identity: Which weights these are, for the fingerprint; found out where omitted (of a
            module, by reading all its weights).
        tokenizer_identity: Which tokenizer makes the ids; the engine itself never tokenises.
        served_model_name: What clients call the model; the identity's name where omitted.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto`` for the one it was saved in.
        device: ``cpu``, ``cuda`` or ``cuda:1``; a GPU where there is one, where omitted.
        precision: ``native``, or ``matched``: everything in IEEE float32, in this whole process.
        max_model_len: Tokens of the longest prompt; the model's own limit where omitted, 2,048
            where it has none.
        sequences_per_call: The most rows in one forward pass, or ``auto``. With 1 and one thread
            the class is ``bitwise``; rows that share a pass have class ``tolerance``.
        depth_bounded: Stop forward passes at the deepest block that is read in them.
        threads: CPU threads of this process; left as they are where omitted.
        num_layers, hidden_size, vocab_size: Of a module without a configuration that names them.
        trust_remote_code: Run code that comes with the model.
        model_args: Further arguments of ``from_pretrained``, such as ``attn_implementation``.
        selftest: Prove the engine before it is used. Only tests turn it off.
        progress_limit_s: A forward pass that takes longer counts as a dead engine.

    Raises:
        NotFoundError: No such model.
        InvalidInputError: An argument that cannot be used, or a module in training mode.
        NotOfferedError: A module on several devices, or a model argument that is not taken.
        CaptureError: The model could not be loaded (``capture_failed``), its structure is not
            understood (``unknown_structure``) or the self-test failed (``self_test_failed``).
    """

    def __init__(  # noqa: PLR0913 (the public surface; all but the model are named)
        self,
        model: str | os.PathLike[str] | nn.Module,
        *,
        model_identity: ModelIdentity | None = None,
        tokenizer_identity: TokenizerIdentity | None = None,
        served_model_name: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        precision: Precision = "native",
        max_model_len: int | None = None,
        sequences_per_call: SequencesPerCall = "auto",
        depth_bounded: bool = True,
        threads: int | None = None,
        num_layers: int | None = None,
        hidden_size: int | None = None,
        vocab_size: int | None = None,
        trust_remote_code: bool = False,
        model_args: Mapping[str, Any] | None = None,
        selftest: bool = True,
        progress_limit_s: float = 600.0,
    ) -> None:
        options = ModelOptions(
            dtype=dtype,
            device=device,
            precision=precision,
            threads=threads,
            max_model_len=max_model_len,
            num_layers=num_layers,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            trust_remote_code=trust_remote_code,
            model_args=model_args or {},
        )
        source: str | nn.Module = model if isinstance(model, nn.Module) else os.fspath(model)
        options.check(source)
        batch_limits(sequences_per_call, "cpu")
        identity = model_identity or identity_of(source)
        names = Names(
            served_model_name or identity.name, identity, tokenizer_identity or _NO_TOKENIZER
        )
        self._progress_limit_s = progress_limit_s
        self._thread = ModelThread("wllm-transformers")

        def start() -> tuple[TransformersDriver, EngineDescription]:
            loaded = load_model(source, options, revision=identity.revision)
            driver = TransformersDriver(loaded, sequences_per_call)
            driver.depth_bounded = depth_bounded
            found = describe(
                loaded, driver.anatomy, names, precision=precision, depth_bounded=depth_bounded
            )
            if selftest:
                found = prove(driver, found, one_row_a_pass=sequences_per_call == 1)
            return driver, found

        self._driver: TransformersDriver | None = None
        try:
            self._driver, self._description = self._thread.submit(start).result()
        except BaseException:
            self._thread.close()
            raise

    @property
    def description(self) -> EngineDescription:
        """What this engine is: model, versions, fingerprint, self-test."""
        return self._description

    async def capture_async(self, task: CaptureTask) -> CapturedChunk:
        """Capture a chunk; cancelling the awaiting task frees its buffers after the pass that runs.

        Raises:
            InvalidInputError: No site, a site listed twice, a layer that is not there, or a
                position that cannot be read.
            NotOfferedError: A site or a position that this engine does not capture.
            CaptureError: The engine failed while it ran the chunk (``capture_failed``), or is
                closed or lost (``engine_dead``).
        """
        job = self._job(task)
        try:
            return await asyncio.wrap_future(self._thread.submit(lambda: self._capture(job)))
        except asyncio.CancelledError:
            job.given_up.set()
            raise

    def capture(self, task: CaptureTask) -> CapturedChunk:
        """Capture a chunk and wait for it; raises as :meth:`capture_async`."""
        job = self._job(task)
        return self._wait(job, self._thread.submit(lambda: self._capture(job)))

    def capture_device(self, task: CaptureTask) -> dict[HookSite, torch.Tensor]:
        """Capture a chunk whose values stay on the model's device, and wait for it.

        Returns:
            For each site, in the task's order, [feature rows, width]: all rows in the task's order,
            in the model's dtype (float32 for ``mean_prompt``), owned by the caller and without a
            gradient.

        Raises:
            InvalidInputError: As :meth:`capture_async`; or a row that cannot be run, because there
                is no place for its failure here.
            CaptureError: As :meth:`capture_async`; or a row that was not captured whole.
        """
        job = self._job(task)
        if job.failures:
            index, failure = next(iter(job.failures.items()))
            raise InvalidInputError(f"row {index}: {failure.message}", code="invalid_rows")
        return self._wait(job, self._thread.submit(lambda: self._capture_device(job)))

    def check(self) -> None:
        """Return at once while the engine is alive and makes progress.

        Raises:
            CaptureError: The engine is dead, closed or stuck (code ``engine_dead``).
        """
        driver = self._live()
        if driver.lost:
            raise CaptureError(
                "the device failed; the replica must be replaced", code="engine_dead"
            )
        started = driver.pass_started
        if started is not None and time.monotonic() - started > self._progress_limit_s:
            raise CaptureError(
                f"one forward pass has been running for over {self._progress_limit_s} s",
                code="engine_dead",
            )

    def close(self) -> None:
        """Stop after the pass that runs now and let the model go; work in flight fails."""
        self._thread.close()
        self._driver = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _live(self) -> TransformersDriver:
        driver = self._driver
        # Closing comes first, and only then is the driver let go.
        self._thread.check()
        assert driver is not None
        return driver

    def _job(self, task: CaptureTask) -> _Job:
        self.check()
        wanted = check_task(task, self._description, self._live().anatomy.readings)
        rows, failures = check_rows(task, self._description)
        return _Job(task, wanted, rows, failures)

    def _wait(self, job: _Job, result: Future[T]) -> T:
        try:
            return result.result()
        except BaseException:
            job.given_up.set()
            raise

    def _capture(self, job: _Job) -> CapturedChunk:
        """On the engine's thread, buffers and proof included."""
        started = time.monotonic()
        driver = self._live()
        chunk = ChunkCapture(job.wanted, job.rows, job.ids)
        driver.run(chunk, lambda: self._go_on(job))
        chunk.prove()
        timings = {"queue": started - job.submitted, "capture": time.monotonic() - started}
        return chunk_of(
            job.task, chunk, job.failures, description=self._description, timings=timings
        )

    def _capture_device(self, job: _Job) -> dict[HookSite, torch.Tensor]:
        driver = self._live()
        chunk = DeviceChunk(job.wanted, job.rows, job.ids, driver.device, driver.dtype)
        driver.run(chunk, lambda: self._go_on(job))
        chunk.prove()
        for row in chunk.rows:
            if row.failure is not None:
                raise CaptureError(
                    f"row {row.wanted.index} ({row.failure.code}): {row.failure.message}",
                    code="capture_failed",
                )
        return chunk.tensors()

    def _go_on(self, job: _Job) -> None:
        self._live()
        if job.given_up.is_set():
            raise CaptureError("the chunk was cancelled", code="capture_failed")
