"""Reading needs the bare install only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.requirement("S-2", "P-4")

HERE = Path(__file__).parent
BLOCKED = (
    "ray", "torch", "vllm", "transformers", "httpx", "typer", "rich", "fastapi", "pandas",
    "sklearn", "matplotlib", "huggingface_hub", "safetensors", "tenacity",
)  # fmt: skip
BLOCKER = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Blocker())
"""


def run(program):
    return subprocess.run(
        [sys.executable, "-c", BLOCKER + program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"PYTHONPATH": str(HERE.parents[1]), "PYTHONWARNINGS": "error"},
    )


def test_a_dataset_loads_with_everything_heavy_blocked():
    done = run(
        "import wllm_ray\n"
        f"dataset = wllm_ray.load_dataset({str(HERE / 'golden/v1')!r}, 'golden', verify='full')\n"
        "print(dataset.features.shape, dataset.to_arrow().num_rows)\n"
    )
    assert (done.stdout, done.returncode) == ("(11, 2, 4) 4\n", 0), done.stderr


def test_importing_the_package_imports_nothing_heavy():
    done = run(
        "before = set(sys.modules)\n"
        "import wllm_ray\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new & {'numpy', 'pyarrow', 'pydantic', 'obstore'}))\n"
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_the_blocker_blocks():
    assert "torch is blocked" in run("import torch\n").stderr
