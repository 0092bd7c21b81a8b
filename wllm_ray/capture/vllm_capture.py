"""vLLM in this process, capturing chunks of rows.

``VLLMCapture`` is a context manager. It owns one thread on which the model is built and run;
``capture`` may be called from any thread and ``capture_async`` from any event loop, and chunks that
are in flight together share forward passes, whatever sites and positions each asks for.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from wllm_ray.capture.coverage import ChunkCapture, RowsWanted, SitesWanted
from wllm_ray.capture.engine_loop import EngineLoop, Job
from wllm_ray.capture.precision import Precision
from wllm_ray.capture.proof import Names
from wllm_ray.capture.request import check_rows, check_task, chunk_of
from wllm_ray.capture.vllm_config import EngineOptions
from wllm_ray.capture.vllm_driver import build_driver
from wllm_ray.capture.vllm_proof import describe, prove
from wllm_ray.errors import CaptureError, InvalidInputError, WLLMError
from wllm_ray.records import (
    CapturedChunk,
    CaptureTask,
    EngineDescription,
    ModelIdentity,
    RowFailure,
    TokenizerIdentity,
)
from wllm_ray.sites import HookSite

__all__ = ["VLLMCapture"]


class VLLMCapture:
    """Captures hook sites with vLLM, in this process and on a thread of its own.

    One at a time in a process. Setting it up changes the process: environment variables that vLLM
    reads, the global random seeds, and on CPU vLLM replaces ``torch.set_num_threads``.

    Args:
        model: A local directory, or a name on a hub.
        model_identity: Which weights these are, for the fingerprint.
        tokenizer_identity: Which tokenizer makes the ids; the engine itself never tokenises.
        served_model_name: What clients call the model; the identity's name where omitted.
        dtype: The model's dtype as vLLM names it; ``auto`` takes the one that it was saved in, so
            a float32 model stays float32.
        max_model_len: Tokens of the longest prompt; the model's own limit where omitted.
        prefill_split_tokens: Tokens in a forward pass, and the fixed multiple at which longer
            prompts are split. Part of the fingerprint.
        max_num_seqs: Prompts in one forward pass.
        threads: CPU threads; 1 where omitted, because more make bits depend on the batch.
        kv_cache_memory_bytes: Size of the key-value cache; on CPU enough for a full pass beside
            one longest prompt where omitted.
        gpu_memory_utilization: Share of the GPU's memory, where the cache's size is omitted.
        precision: ``native``, or ``matched``: everything in IEEE float32.
        prefix_caching: Let prompts that are read at their last token alone start from what others
            with the same beginning have left. Fewer tokens are run, and the class is `tolerance`.
        depth_bounded: Stop forward passes at the deepest block that is read in them.
        tensor_parallel_size, pipeline_parallel_size: Only 1 is offered.
        allow_unprofiled_vllm: Accept a vLLM version that was not tested; needs the self-test.
        hf_overrides: Changes to the model's configuration, as vLLM takes them.
        vllm_args: Further arguments of vLLM's ``EngineArgs``.
        selftest: Prove the engine before it is used. Only tests turn it off.
        progress_limit_s: A forward pass that takes longer counts as a dead engine.

    Raises:
        NotOfferedError: Parallelism above 1, or a vLLM version without a profile.
        InvalidInputError: An argument that cannot be used.
        CaptureError: The engine could not be built (``capture_failed``), the model's structure is
            not understood (``unknown_structure``) or the self-test failed (``self_test_failed``).
    """

    def __init__(  # noqa: PLR0913 (the public surface; all but the model are named)
        self,
        model: str,
        *,
        model_identity: ModelIdentity,
        tokenizer_identity: TokenizerIdentity,
        served_model_name: str | None = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        prefill_split_tokens: int = 1024,
        max_num_seqs: int = 256,
        threads: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        gpu_memory_utilization: float = 0.9,
        precision: Precision = "native",
        prefix_caching: bool = False,
        depth_bounded: bool = True,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        allow_unprofiled_vllm: bool = False,
        hf_overrides: dict[str, Any] | None = None,
        vllm_args: dict[str, Any] | None = None,
        selftest: bool = True,
        progress_limit_s: float = 600.0,
    ) -> None:
        options = EngineOptions(
            model=str(model),
            # The commit that the identity names, so that a branch cannot move underneath.
            revision=None if Path(model).is_dir() else model_identity.revision,
            dtype=dtype,
            max_model_len=max_model_len,
            prefill_split_tokens=prefill_split_tokens,
            max_num_seqs=max_num_seqs,
            threads=threads,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
            precision=precision,
            prefix_caching=prefix_caching,
            depth_bounded=depth_bounded,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            allow_unprofiled_vllm=allow_unprofiled_vllm,
            hf_overrides=hf_overrides,
            vllm_args=vllm_args or {},
        )
        options.check(selftest=selftest)
        self._request_numbers = itertools.count()
        self._loop = EngineLoop(lambda: build_driver(options), progress_limit_s=progress_limit_s)
        # What is found in the cache is not run, so no pass is as it was planned.
        self._loop.strict_splits = not prefix_caching
        _take_process()
        self._holds_process = True
        try:
            _start(self._loop)
        except BaseException:
            _give_process_back(self)
            raise
        driver = self._loop.driver
        self._facts, self._anatomy = driver.facts, driver.anatomy
        name = served_model_name or model_identity.name
        names = Names(name, model_identity, tokenizer_identity)
        self._description = describe(driver, options, names)
        try:
            if selftest:
                found = prove(self._loop, options, self._description, self._capture_for_test)
                self._anatomy, self._description = found
            else:
                driver.capture.depth_bounded = depth_bounded
        except BaseException:
            self.close()
            raise
        self._loop.strict_splits = self._description.fingerprint.reproducibility == "bitwise"

    @property
    def description(self) -> EngineDescription:
        """What this engine is: model, versions, fingerprint, self-test."""
        return self._description

    async def capture_async(self, task: CaptureTask) -> CapturedChunk:
        """Capture a chunk; cancelling the awaiting task stops it and frees its buffers.

        Raises:
            InvalidInputError: No site, a site listed twice, a layer that is not there, or a
                position that cannot be read.
            NotOfferedError: A site or a position that this engine does not capture.
            CaptureError: The engine failed while it ran the chunk (code ``engine_dead``).
        """
        job, failures = self._submit(task)
        try:
            await asyncio.wrap_future(job.done)
        except asyncio.CancelledError:
            self._loop.cancel(job)
            raise
        # Proving reads every value, too long for an event loop that answers health checks.
        return await asyncio.to_thread(self._result, task, job, failures)

    def capture(self, task: CaptureTask) -> CapturedChunk:
        """Capture a chunk and wait for it; raises as :meth:`capture_async`."""
        job, failures = self._submit(task)
        try:
            job.done.result()
        except BaseException:
            self._loop.cancel(job)
            raise
        return self._result(task, job, failures)

    def check(self) -> None:
        """Return at once while the engine is alive and makes progress.

        Raises:
            CaptureError: The engine is dead, closed or stuck (code ``engine_dead``).
        """
        self._loop.check()

    def close(self) -> None:
        """Stop the engine after the pass that runs now and free what it holds."""
        self._loop.close()
        _give_process_back(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _submit(self, task: CaptureTask) -> tuple[Job, dict[int, RowFailure]]:
        wanted = check_task(task, self._description, self._anatomy.readings)
        good, failures = check_rows(task, self._description)
        return self._loop.submit(self._chunk(good, wanted, None)), failures

    def _chunk(
        self, rows: list[RowsWanted], wanted: SitesWanted, num_logprobs: int | None
    ) -> ChunkCapture:
        # Never the user's ids: two tasks may hold the same row, and a retry holds it again.
        ids = [f"wllm-{next(self._request_numbers)}" for _ in rows]
        return ChunkCapture(wanted, rows, ids, num_logprobs)

    def _result(
        self, task: CaptureTask, job: Job, failures: dict[int, RowFailure]
    ) -> CapturedChunk:
        capture = job.capture
        capture.prove()
        return chunk_of(
            task, capture, failures, description=self._description, timings=job.timings()
        )

    def _capture_for_test(
        self, rows: list[RowsWanted], sites: tuple[HookSite, ...], num_logprobs: int | None
    ) -> ChunkCapture:
        readings = self._anatomy.readings
        wanted = SitesWanted(
            sites=sites,
            widths=tuple(readings[site].width for site in sites),
            depth=max(readings[site].depth for site in sites),
            last_only=all(row.positions[0] == len(row.token_ids) - 1 for row in rows),
        )
        job = self._loop.submit(self._chunk(rows, wanted, num_logprobs))
        capture = job.done.result().capture
        capture.prove()
        return capture


# vLLM keeps its parallel groups in the process: closing one engine takes them from the other.
_process = threading.Lock()


def _take_process() -> None:
    if not _process.acquire(blocking=False):
        raise CaptureError(
            "another vLLM engine is open in this process, and vLLM takes one at a time; close it "
            "first, or run the second one in a process of its own",
            code="capture_failed",
        )


def _give_process_back(engine: VLLMCapture) -> None:
    if engine._holds_process:  # noqa: SLF001 (this module's own)
        engine._holds_process = False  # noqa: SLF001
        _process.release()


def _start(loop: EngineLoop) -> None:
    """Build the engine; a foreign error becomes the cause of one of ours and is not quoted."""
    try:
        loop.start()
    except WLLMError:
        raise
    except Exception as error:
        if "max_model_len" in str(error):
            raise InvalidInputError(
                "vLLM refuses max_model_len: the model takes shorter rows than that; lower it, or "
                "leave it out for the model's own length",
                code="invalid_argument",
            ) from error
        memory = isinstance(error, MemoryError) or "memory" in str(error).lower()
        advice = "; lower max_model_len or kv_cache_memory_bytes" if memory else ""
        raise CaptureError(
            f"vLLM could not load the model ({type(error).__name__}); the log has more{advice}",
            code="capture_failed",
        ) from error
