"""Applications whose engines misbehave, for tests of what the rest makes of it.

Serve imports these by name in its own processes.
"""
# No `from __future__ import annotations`: Serve reads the builders' annotations at run time.

import asyncio
import dataclasses
import os
from pathlib import Path

from deployments.activation import load_vllm_engine
from deployments.app import bind_app
from deployments.args import AppArgs
from tests.fakes import POISON, FakeEngine, fake_description
from wllm_ray.capture.tokenizer import TransformersTokenizer

PREEMPTIONS = 6


def notes(args: AppArgs) -> Path:
    """Where an engine notes what happened to it."""
    folder = Path(args.model).parent / "notes"
    folder.mkdir(exist_ok=True)
    return folder


def crowded_engine(args, identity):
    """vLLM with a cache that is too small for what is admitted, until it has pre-empted enough.

    Admission never lets that happen, so its limits are lifted, and prompts are run a little at a
    time, so that they grow until somebody has to go.
    """
    engine = load_vllm_engine(args, identity)
    admission, scheduler = engine._loop._admission, engine._loop.driver._core.scheduler
    limits, preempt = admission._limits, scheduler._preempt_request
    preempted = []

    def note(request, *more, **options):
        preempted.append(request.request_id)
        if len(preempted) == PREEMPTIONS:
            admission._limits = limits
            scheduler.scheduler_config.long_prefill_token_threshold = 0
            (notes(args) / f"preempted-{os.getpid()}").touch()
        return preempt(request, *more, **options)

    admission._limits = dataclasses.replace(limits, pass_tokens=10**6, cache_blocks=10**6)
    scheduler._preempt_request = note
    scheduler.scheduler_reserve_full_isl = False
    scheduler.scheduler_config.long_prefill_token_threshold = 16
    return engine


class PoisonableEngine(FakeEngine):
    """Dies of rows with :data:`POISON`, with all that is in flight."""

    async def capture_async(self, task):
        await asyncio.sleep(0.05)
        if any(POISON in row.token_ids for row in task.rows):
            os._exit(1)
        return await super().capture_async(task)


class SlowEngine(FakeEngine):
    """Takes a minute for a chunk, and notes what begins and what is given up."""

    folder: Path

    async def capture_async(self, task):
        (self.folder / f"began-{task.rows[0].index}").touch()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            (self.folder / f"cancelled-{task.rows[0].index}").touch()
            raise
        return await super().capture_async(task)


def fake_engine(kind, args, identity):
    """A fake engine that says it runs the model that the application names."""
    tokenizer = TransformersTokenizer(args.model, identity)
    description = fake_description(
        served_model_name=args.served_model_name, model=identity, tokenizer=tokenizer.identity
    )
    fingerprint = description.fingerprint.model_copy(
        update={
            "model_revision": identity.revision,
            "tokenizer_revision": tokenizer.identity.revision,
        }
    )
    return kind(description=description.model_copy(update={"fingerprint": fingerprint}))


def load_poisonable(args, identity):
    return fake_engine(PoisonableEngine, args, identity)


def load_slow(args, identity):
    engine = fake_engine(SlowEngine, args, identity)
    engine.folder = notes(args)
    return engine


def build_crowded(args: AppArgs):
    return bind_app(args, crowded_engine)


def build_poisonable(args: AppArgs):
    return bind_app(args, load_poisonable)


def build_slow(args: AppArgs):
    return bind_app(args, load_slow)
