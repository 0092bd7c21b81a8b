"""vLLM in this process, as an engine that returns activations.

``VLLMEngine`` is a context manager. It owns one thread on which the model is built and run;
``extract`` may be called from any thread and ``extract_async`` from any event loop, and chunks that
are in flight together share forward passes.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from wllm_ray.capture.coverage import ChunkCapture, RowsWanted
from wllm_ray.capture.engine_loop import EngineLoop, Job
from wllm_ray.capture.request import (
    POSITIONS,
    SITE_KINDS,
    ModelLimits,
    check_rows,
    check_task,
)
from wllm_ray.capture.selftest import NOT_TESTED, Subject, run_selftest
from wllm_ray.capture.vllm_config import EngineOptions
from wllm_ray.capture.vllm_driver import build_driver
from wllm_ray.capture.vllm_facts import (
    batch_invariant,
    device_name,
    dtype_name,
    library_versions,
    vllm_version,
)
from wllm_ray.errors import CaptureError, InvalidInputError, WLLMError
from wllm_ray.records import (
    CapturedChunk,
    CaptureTask,
    EngineDescription,
    Fingerprint,
    ModelIdentity,
    RowFailure,
    SelfTestReport,
    TokenizerIdentity,
)

__all__ = ["VLLMEngine"]


class VLLMEngine:
    """Captures the residual stream with vLLM, in this process and on a thread of its own.

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
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            allow_unprofiled_vllm=allow_unprofiled_vllm,
            hf_overrides=hf_overrides,
            vllm_args=vllm_args or {},
        )
        options.check(selftest=selftest)
        self._request_numbers = itertools.count()
        self._loop = EngineLoop(lambda: build_driver(options), progress_limit_s=progress_limit_s)
        _start(self._loop)
        driver = self._loop.driver
        self._facts = driver.facts
        self._limits = ModelLimits(
            driver.facts.num_layers, driver.facts.vocab_size, driver.max_model_len
        )
        try:
            report = self._selftest() if selftest else NOT_TESTED
        except BaseException:
            self.close()
            raise
        self._loop.strict_splits = report.reproducibility == "bitwise"
        name = served_model_name or model_identity.name
        self._description = self._describe(name, model_identity, tokenizer_identity, report)

    @property
    def description(self) -> EngineDescription:
        """What this engine is: model, versions, fingerprint, self-test."""
        return self._description

    async def extract_async(self, task: CaptureTask) -> CapturedChunk:
        """Capture a chunk; cancelling the awaiting task stops it and frees its buffers.

        Raises:
            InvalidInputError: No site, a site listed twice, or a layer that is not there.
            NotOfferedError: A site kind or a position that this engine does not capture.
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

    def extract(self, task: CaptureTask) -> CapturedChunk:
        """Capture a chunk and wait for it; raises as :meth:`extract_async`."""
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
        layers = check_task(task, self._limits)
        good, failures = check_rows(task, self._limits)
        return self._loop.submit(self._chunk(good, layers, None)), failures

    def _chunk(
        self, rows: list[RowsWanted], layers: tuple[int, ...], num_logprobs: int | None
    ) -> ChunkCapture:
        # Never the user's ids: two tasks may hold the same row, and a retry holds it again.
        ids = [f"wllm-{next(self._request_numbers)}" for _ in rows]
        return ChunkCapture(layers, rows, ids, self._facts.hidden_size, num_logprobs)

    def _result(
        self, task: CaptureTask, job: Job, failures: dict[int, RowFailure]
    ) -> CapturedChunk:
        capture = job.capture
        capture.prove()
        bad = {row.wanted.index: row.failure for row in capture.rows if row.failure is not None}
        good = {row.wanted.index: row for row in capture.rows if row.failure is None}
        lengths = [len(good[r.index].wanted.positions) if r.index in good else 0 for r in task.rows]
        features = capture.features
        if bad:
            kept = [features[row.slots] for row in good.values()]
            features = np.concatenate(kept) if kept else features[:0]
        return CapturedChunk(
            row_index=np.array([row.index for row in task.rows], dtype=np.int64),
            lengths=np.array(lengths, dtype=np.int64),
            features=features,
            failures=failures | bad,
            description=self._description,
            timings=job.timings(),
            recaptured=capture.recaptured,
        )

    def _describe(
        self, name: str, model: ModelIdentity, tokenizer: TokenizerIdentity, report: SelfTestReport
    ) -> EngineDescription:
        driver = self._loop.driver
        fingerprint = Fingerprint(
            model_revision=model.revision,
            tokenizer_revision=tokenizer.revision,
            engine="vllm",
            engine_version=vllm_version(),
            engine_dtype=dtype_name(self._facts.dtype),
            precision="native",
            device=device_name(self._facts.device),
            threads=driver.threads,
            prefill_split_tokens=driver.limits.split_tokens,
            reproducibility=report.reproducibility,
        )
        return EngineDescription(
            served_model_name=name,
            model=model,
            tokenizer=tokenizer,
            architecture=self._facts.architecture,
            num_layers=self._limits.num_layers,
            hidden_size=self._facts.hidden_size,
            vocab_size=self._limits.vocab_size,
            max_model_len=self._limits.max_model_len,
            site_kinds=SITE_KINDS,
            positions=POSITIONS,
            fingerprint=fingerprint,
            versions=library_versions(),
            selftest=report,
        )

    def _selftest(self) -> SelfTestReport:
        driver = self._loop.driver
        # A recurrent state is rounded by where its passes begin; in 16 bits a few probe prompts
        # can all hide that.
        invariant = driver.threads == 1 or batch_invariant()
        return run_selftest(
            Subject(
                capture=self._capture_for_test,
                log_probabilities=lambda rows: self._loop.call(
                    lambda: driver.log_probabilities(rows)
                ),
                num_layers=self._limits.num_layers,
                vocab_size=self._limits.vocab_size,
                max_model_len=self._limits.max_model_len,
                split_tokens=driver.limits.split_tokens,
                dtype=dtype_name(self._facts.dtype),
                residual=driver.topology.describe(),
                may_be_bitwise=invariant and not self._facts.recurrent,
            )
        )

    def _capture_for_test(
        self, rows: list[RowsWanted], layers: tuple[int, ...], num_logprobs: int | None
    ) -> ChunkCapture:
        job = self._loop.submit(self._chunk(rows, layers, num_logprobs))
        capture = job.done.result().capture
        capture.prove()
        return capture


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
        raise CaptureError(
            f"vLLM could not load the model ({type(error).__name__}); the log has more. Where it "
            "is memory, lower max_model_len or kv_cache_memory_bytes",
            code="capture_failed",
        ) from error
