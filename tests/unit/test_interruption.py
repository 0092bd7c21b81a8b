"""How a command ends that a signal interrupts, whatever its tasks are doing."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import pytest

from wllm_ray.cli.interruption import INTERRUPTED, TERMINATED, run_async, sigterm_interrupts

# A signal reaches a process while a task runs that nobody waits for yet.
COMMAND = """
import asyncio, os, signal, sys
from wllm_ray.cli.interruption import run_async
from wllm_ray.cli.reporting import ends_with_json

signal.signal(signal.SIGINT, {sigint})

async def work():
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.{sent})
    await asyncio.sleep(60)

async def main():
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(work())
            await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0)
        print("closed", file=sys.stderr)

@ends_with_json
def command():
    run_async(main())

import typer
app = typer.Typer()
app.command()(command)
app()
"""


@pytest.fixture
def sigint():
    """Sets how SIGINT is handled, until the test ends."""
    before = signal.getsignal(signal.SIGINT)
    yield lambda handler: signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGINT, before)


@pytest.mark.requirement("L-3")
@pytest.mark.parametrize(
    ("sent", "handler", "code"),
    [
        ("SIGINT", "signal.default_int_handler", 130),
        ("SIGTERM", "signal.default_int_handler", 143),
        ("SIGTERM", "signal.SIG_IGN", 143),
    ],
)
def test_a_signal_in_a_task_ends_all_tasks_in_order(sent, handler, code):
    source = COMMAND.format(sigint=handler, sent=sent)
    ended = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == code
    assert json.loads(ended.stdout) == {"status": "interrupted", "exit_code": code}
    assert ended.stderr.splitlines() == [
        "closed",
        "interrupted; what is written stays, and running again goes on from there",
    ]


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_a_second_signal_does_not_wait_for_what_the_first_has_cancelled(sigint, handler):
    sigint(handler)

    async def main():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)

    with sigterm_interrupts() as code, pytest.raises(KeyboardInterrupt):
        run_async(main())
    assert code() == TERMINATED


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_a_second_signal_ends_what_does_not_let_the_loop_go_on(sigint, handler):
    sigint(handler)
    reached = []

    async def main():
        os.kill(os.getpid(), signal.SIGTERM)
        reached.append("first")
        os.kill(os.getpid(), signal.SIGTERM)
        reached.append("second")

    with sigterm_interrupts() as code, pytest.raises(KeyboardInterrupt):
        run_async(main())
    assert (code(), reached) == (TERMINATED, ["first"])


def test_sigterm_cancels_also_where_nobody_else_handles_it(sigint):
    sigint(signal.SIG_IGN)
    ended = []

    async def main():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("in order")
            raise

    with pytest.raises(KeyboardInterrupt):
        run_async(main())
    assert ended == ["in order"]


def test_who_cancels_without_a_signal_is_not_called_an_interruption(sigint):
    sigint(signal.SIG_IGN)

    async def main():
        raise asyncio.CancelledError

    with sigterm_interrupts() as code, pytest.raises(asyncio.CancelledError):
        run_async(main())
    assert code() == INTERRUPTED


def test_handlers_are_as_before_afterwards():
    async def main():
        return 7

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with sigterm_interrupts():
        assert run_async(main()) == 7
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
