"""How commands are interrupted: SIGTERM does what SIGINT does, and tasks end in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, TypeVar

__all__ = ["INTERRUPTED", "TERMINATED", "run_async", "sigterm_interrupts"]

Result = TypeVar("Result")

# As shells count: 128 and the signal's number.
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[Callable[[], int]]:
    """Let SIGTERM do what SIGINT does; yields what tells the exit code of an interruption."""
    code = INTERRUPTED

    def interrupt(_number: int, frame: FrameType | None) -> None:
        nonlocal code
        code = TERMINATED
        # Called rather than sent: a shell's background jobs ignore SIGINT.
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):
            raise KeyboardInterrupt
        handler(signal.SIGINT, frame)

    with _handling(signal.SIGTERM, interrupt):
        yield lambda: code


def run_async(main: Coroutine[Any, Any, Result]) -> Result:
    """As :func:`asyncio.run`; the first SIGTERM cancels `main` also where SIGINT is ignored.

    For SIGINT asyncio itself does so, unless SIGINT is ignored. An exception would be raised in
    whichever task happens to run, and one that nobody waits for dies with a traceback.

    Raises:
        KeyboardInterrupt: `main` was cancelled by a signal.
    """
    signals = 0

    async def cancelled_by_sigterm() -> Result:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        outer = signal.getsignal(signal.SIGTERM)
        handle = outer if callable(outer) else signal.default_int_handler

        def interrupt(number: int, frame: FrameType | None) -> None:
            nonlocal signals
            signals += 1
            try:
                handle(number, frame)
            except KeyboardInterrupt:
                if signals > 1 or task is None:
                    raise
                # The loop may be asleep; this wakes it.
                loop.call_soon_threadsafe(task.cancel)

        with _handling(signal.SIGTERM, interrupt):
            return await main

    try:
        return asyncio.run(cancelled_by_sigterm())
    except asyncio.CancelledError:
        if signals:
            raise KeyboardInterrupt from None
        raise


@contextlib.contextmanager
def _handling(
    number: signal.Signals, handler: Callable[[int, FrameType | None], Any]
) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
