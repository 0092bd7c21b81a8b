"""vLLM's second model runner, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.requirement("C-12", "C-2", "C-9")

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "family",
    [
        "qwen3",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("gemma3", "granite", "gpt_neox")),
    ],
)
def test_the_second_runner_gives_the_right_numbers_at_every_site(family, tiny_model, tmp_path):
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, HERE / "v2_runner.py", tiny_model(family), family],
        cwd=HERE.parents[1],
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1]), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert told["differ"] == []
    assert told["relative_l2"] <= 1e-4
    assert told["reproducibility"] == "bitwise"
