"""The activation replica: one engine, on one GPU or on the CPU, behind a Serve deployment."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deployments.args import AppArgs
from wllm_ray.capture.gate import Gate
from wllm_ray.capture.protocol import Engine
from wllm_ray.errors import CaptureError
from wllm_ray.records import CapturedChunk, CaptureTask, EngineDescription, ModelIdentity

__all__ = ["ActivationReplica", "EngineLoader", "load_vllm_engine"]

EngineLoader = Callable[[AppArgs, ModelIdentity], Engine]

# Long enough for the answer that reports the death to leave the process.
EXIT_DELAY_S = 1.0

logger = logging.getLogger("ray.serve")


def load_vllm_engine(args: AppArgs, identity: ModelIdentity) -> Engine:
    """Import vLLM here, in the replica: its device is only known where Ray put it."""
    # Ray sets this from num_cpus before the replica starts, and torch reads it at import.
    os.environ["OMP_NUM_THREADS"] = str(args.threads or 1)
    from wllm_ray.engines.vllm import load_vllm

    engine, _ = load_vllm(
        args.model,
        identity,
        trust_remote_code=args.trust_remote_code,
        served_model_name=args.served_model_name or identity.name,
        dtype=args.dtype,
        precision=args.precision,
        max_model_len=args.max_model_len,
        prefill_split_tokens=args.prefill_split_tokens,
        prefix_caching=args.prefix_caching,
        depth_bounded=args.depth_bounded,
        max_num_seqs=args.max_num_seqs,
        threads=args.threads,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        gpu_memory_utilization=args.gpu_memory_utilization,
        allow_unprofiled_vllm=args.allow_unprofiled_vllm,
    )
    return engine


class ActivationReplica:
    """Holds the engine; adds nothing to it but the border to Ray.

    The constructor returns only after the self-test has passed, so a replica that runs is one that
    was proven.

    Args:
        args: The application's arguments.
        identity: The model, resolved once for all replicas.
        load_engine: Makes the engine.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits constructors
        self, args: AppArgs, identity: ModelIdentity, load_engine: EngineLoader
    ) -> None:
        # The engine is built on a plain thread: a constructor here runs on the replica's loop.
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(max_workers=1) as pool:
            self._engine = await loop.run_in_executor(pool, load_engine, args, identity)
        self._gate = Gate()

    async def describe(self) -> EngineDescription:
        """What this replica runs."""
        return self._engine.description

    async def capture(self, task: CaptureTask, alone: bool) -> AsyncIterator[Any]:  # noqa: FBT001
        """Run a chunk, in three steps that the caller can tell apart.

        Args:
            task: The chunk.
            alone: Let nothing else run on this engine meanwhile.

        Yields:
            None when it is this chunk's turn, the number of rows when it is captured, then the
            captured chunk as an object of its own: the small items tell the caller how far it is
            without pulling the arrays.
        """
        async with self._gate.enter(alone=alone):
            yield None
            captured = await self._captured(task)
        yield len(captured.row_index)
        yield captured

    async def _captured(self, task: CaptureTask) -> CapturedChunk:
        try:
            return await self._engine.capture_async(task)
        except CaptureError as error:
            if error.code == "engine_dead":
                # A hard exit, since Ray takes a graceful one for intended. The health check
                # would find out too, half a minute and many failed chunks later.
                logger.error("the engine is dead; this replica exits so that Serve replaces it")  # noqa: TRY400
                asyncio.get_running_loop().call_later(EXIT_DELAY_S, os._exit, 1)
            raise

    async def check_health(self) -> None:
        """Raise where the engine is dead or stuck, so that Serve replaces this replica."""
        self._engine.check()

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.close()
