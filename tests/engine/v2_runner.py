"""Runs vLLM's second model runner, the GPU's own routing code, on the CPU; a program of its own.

It cannot share a process with V1. Prints JSON: the runner's class, the self-test's class, sites
that are missing or should not be there, and the largest distance of any site at any token from
Transformers.
"""

# ruff: noqa: I001, T201 (the environment comes first; the answer is printed)

import v2_environment  # noqa: F401 (before anything of vLLM)

import json
import sys

from conftest import SPLIT, capture_everything, prompts_of, relative_l2
from reference import Reference

from wllm_ray.capture.vllm_capture import VLLMCapture
from wllm_ray.records import ModelIdentity, TokenizerIdentity


def main(model, family):
    prompts = prompts_of([1, 1, 7, 8, 20, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 1, 33, 5, 90])
    expected = Reference(model, family).all_sites(prompts)
    with VLLMCapture(
        model,
        model_identity=ModelIdentity(name="tiny", revision="sha256:test"),
        tokenizer_identity=TokenizerIdentity(
            name="tiny", revision="sha256:test", chat_template_sha256=None
        ),
        prefill_split_tokens=SPLIT,
        max_num_seqs=8,
    ) as engine:
        runner = engine._loop.driver._core.model_executor.driver_worker.worker.model_runner
        found = capture_everything(engine, prompts)
    print(
        json.dumps(
            {
                "runner": type(runner).__module__,
                "reproducibility": engine.description.fingerprint.reproducibility,
                "differ": sorted(set(found) ^ set(expected)),
                "relative_l2": float(
                    max(relative_l2(rows, expected[name]).max() for name, rows in found.items())
                ),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
