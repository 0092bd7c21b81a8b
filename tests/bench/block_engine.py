"""An engine that costs next to nothing, and what a job over it needs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.fakes import FakeTokenizer, fake_description
from wllm_ray.job.rows_file import RowsFile
from wllm_ray.job.source import SourcePlan
from wllm_ray.records import CapturedChunk, CaptureTask, EngineDescription, SiteSupport
from wllm_ray.requests import select

DATASET = "bench"
SITE = "L3_resid_post"
_MOST_ROWS = 4096


class ByteTokenizer(FakeTokenizer):
    """UTF-8 bytes as ids, as fast as Python makes a list of them."""

    def encode_prompts(self, prompts: Sequence[str]) -> list[list[int]]:
        return [list(prompt.encode()) for prompt in prompts]


class BlockEngine:
    """Answers every chunk with rows of one block of random numbers, which are not copied.

    Args:
        width: Of its one site.
    """

    def __init__(self, width: int) -> None:
        self.description = block_description(width)
        rng = np.random.default_rng(0)
        self._block = rng.standard_normal((_MOST_ROWS, width), dtype=np.float32)

    async def capture_async(self, task: CaptureTask) -> CapturedChunk:
        return self.capture(task)

    def capture(self, task: CaptureTask) -> CapturedChunk:
        count = len(task.rows)
        return CapturedChunk(
            row_index=np.fromiter((row.index for row in task.rows), np.int64, count),
            lengths=np.ones(count, np.int64),
            features=self._block[:count],
            widths=self._block.shape[1:],
            failures={},
            description=self.description,
            timings={"forward_s": 0.0},
        )

    def check(self) -> None:
        """Always alive."""

    def close(self) -> None:
        """Nothing to free."""


def block_description(width: int) -> EngineDescription:
    site = SiteSupport(kind="resid_post", layers=(0, 1, 2, 3), width=width)
    return fake_description(hidden_size=width, sites=(site,))


def plan_of(description: EngineDescription, rows: Path, **options: Any) -> SourcePlan:
    selection = select(description, layers=None, site="block", sites=[SITE], position="last_prompt")
    return SourcePlan(description, selection, RowsFile(rows), DATASET, **options)


def write_rows(path: Path, count: int) -> None:
    """Rows of about 50 tokens with two fields of metadata each."""
    with path.open("w") as file:
        for number in range(count):
            row = {
                "id": f"row-{number:07d}",
                "prompt": f"Statement {number} says that the city has a river.",
                "metadata": {"label": number % 2, "topic": "cities"},
            }
            file.write(json.dumps(row) + "\n")
