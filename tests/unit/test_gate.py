"""Who is alone on an engine is alone."""

import asyncio

import pytest

from wllm_ray.capture.gate import Gate


class Visitors:
    def __init__(self) -> None:
        self.gate = Gate()
        self.inside: list[str] = []
        self.seen: list[tuple[str, ...]] = []

    async def visit(self, name: str, *, alone: bool = False) -> None:
        async with self.gate.enter(alone=alone):
            self.inside.append(name)
            self.seen.append(tuple(self.inside))
            await asyncio.sleep(0.01)
            self.inside.remove(name)


@pytest.mark.requirement("R-4")
async def test_shared_visitors_share_and_a_lone_one_shares_with_nobody():
    visitors = Visitors()
    async with asyncio.TaskGroup() as group:
        for name in ("a", "b"):
            group.create_task(visitors.visit(name))
        await asyncio.sleep(0)
        group.create_task(visitors.visit("lone", alone=True))
        await asyncio.sleep(0)
        for name in ("c", "d"):
            group.create_task(visitors.visit(name))
    assert visitors.seen == [("a",), ("a", "b"), ("lone",), ("c",), ("c", "d")]


async def test_a_cancelled_wait_to_be_alone_holds_nobody_back():
    visitors = Visitors()
    first = asyncio.create_task(visitors.visit("a"))
    await asyncio.sleep(0)
    lone = asyncio.create_task(visitors.visit("lone", alone=True))
    await asyncio.sleep(0)
    late = asyncio.create_task(visitors.visit("b"))
    await asyncio.sleep(0)
    lone.cancel()
    async with asyncio.timeout(1):
        await asyncio.gather(first, late, lone, return_exceptions=True)
    assert ("lone",) not in visitors.seen
    assert "b" in visitors.seen[-1]


async def test_a_cancelled_visit_leaves_its_place():
    visitors = Visitors()
    lone = asyncio.create_task(visitors.visit("lone", alone=True))
    await asyncio.sleep(0)
    lone.cancel()
    async with asyncio.timeout(1):
        await asyncio.gather(lone, visitors.visit("a"), return_exceptions=True)
    assert visitors.seen[-1][-1] == "a"
