"""Lets chunks share an engine, or one have it alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["Gate"]


class Gate:
    """Many may be inside together, or one alone; who waits to be alone goes before newcomers."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._inside = 0
        self._alone = False
        self._waiting_alone = 0

    @asynccontextmanager
    async def enter(self, *, alone: bool) -> AsyncIterator[None]:
        """Wait for a place, and leave it at the end of the block."""
        await (self._enter_alone() if alone else self._enter_shared())
        try:
            yield
        finally:
            # Leaving must not be interrupted, or the place would be taken for ever.
            self._inside -= 1
            self._alone = False
            await asyncio.shield(self._announce())

    async def _enter_shared(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not (self._alone or self._waiting_alone))
            self._inside += 1

    async def _enter_alone(self) -> None:
        async with self._changed:
            self._waiting_alone += 1
            try:
                await self._changed.wait_for(lambda: self._inside == 0)
                self._inside, self._alone = 1, True
            finally:
                self._waiting_alone -= 1
                # Where the wait was cancelled, those held back for it may go on.
                self._changed.notify_all()

    async def _announce(self) -> None:
        async with self._changed:
            self._changed.notify_all()
