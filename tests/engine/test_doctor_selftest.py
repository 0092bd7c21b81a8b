"""``wllm doctor --self-test`` with a real engine, in a process of its own."""

import json
import os
import subprocess
import sys

import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import build_tiny_model

NOBODY = "http://127.0.0.1:9"
WLLM = [sys.executable, "-c", "from wllm_ray.cli import main; main()"]


def doctor(model, *flags):
    command = [*WLLM, "doctor", "--self-test", "--model", str(model), "--dashboard-url", NOBODY]
    return subprocess.run([*command, *flags], capture_output=True, text=True, check=False)


@pytest.mark.requirement("L-1", "C-11")
def test_a_model_is_proven_and_its_class_is_told(tmp_path):
    build_tiny_model("qwen3", tmp_path / "tiny")
    done = doctor(tmp_path / "tiny", "--json", "--dtype", "float32", "--max-model-len", "64")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)  # nothing that the engine says gets between
    found = {check["name"]: check["found"] for check in report["checks"]}
    assert found["self-test, reproducibility class"] == "bitwise"
    assert "prompts of 1, 3, 8" in found["self-test"]
    assert {"self-test, residual", "self-test, logits", "self-test, rows"} <= set(found)
    assert "64 tokens" in found["self-test"], "the length that was asked for"


@pytest.mark.requirement("L-1", "C-11")
def test_a_model_that_cannot_be_proven_fails_the_check(tmp_path):
    weights = build_tiny_model("qwen3", tmp_path / "tiny") / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"][:] = float("nan")
    save_file(tensors, weights, metadata={"format": "pt"})
    done = doctor(tmp_path / "tiny")
    assert done.returncode == 2
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert line.startswith("FAIL  self-test: [")
    assert "→ the application would not get ready with this model" in done.stdout


@pytest.mark.requirement("P-3")
def test_vllm_does_not_write_to_stdout(tmp_path):
    """A script's output is what the script prints."""
    build_tiny_model("qwen3", tmp_path / "tiny")
    script = (
        "import sys; from wllm_ray import VLLMEngine\n"
        "with VLLMEngine(sys.argv[1], layers=[1], max_model_len=64, selftest=False) as engine:\n"
        "    print(engine.extract([[5, 6]]).features.shape)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "tiny")],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "(1, 128)\n"
    assert "INFO" in done.stderr
