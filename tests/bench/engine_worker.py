"""``python -m tests.bench.engine_worker capture|bare MODEL DTYPE``: answers timed calls.

vLLM takes one engine in a process, so plain vLLM and capture have one each. A line of JSON on
standard input asks for one call, a line on standard output answers; what vLLM prints goes to
standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from tests.bench.harness import timed

CACHE_BYTES = 1 << 30
THREADS = 1
Call = Callable[[dict[str, Any]], None]


def capture_calls(model: str, _dtype: str) -> tuple[Call, dict[str, Any]]:
    import numpy as np

    from wllm_ray.engines.vllm import load_vllm
    from wllm_ray.records import CaptureTask, TokenRow
    from wllm_ray.sites import parse_site

    engine, _ = load_vllm(model, threads=THREADS, kv_cache_memory_bytes=CACHE_BYTES)

    def call(asked: dict[str, Any]) -> None:
        rows = [TokenRow(n, np.array(ids, np.int32)) for n, ids in enumerate(asked["prompts"])]
        chunk = engine.capture(
            CaptureTask((parse_site(asked["site"]),), asked["position"], tuple(rows))
        )
        assert not chunk.failures, chunk.failures

    served = engine.description
    fingerprint = served.fingerprint
    return call, {
        "layers": served.num_layers,
        "vocab_size": served.vocab_size,
        "dtype": fingerprint.engine_dtype,
        "device": fingerprint.device,
        "threads": fingerprint.threads,
    }


def bare_calls(model: str, dtype: str) -> tuple[Call, dict[str, Any]]:
    """vLLM as it is, but for what capture is given as well: threads, dtype, no prefix cache."""
    os.environ |= {
        "OMP_NUM_THREADS": str(THREADS),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    import torch
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        dtype=dtype,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        enforce_eager=True,
        kv_cache_memory_bytes=CACHE_BYTES,
    )
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

    def call(asked: dict[str, Any]) -> None:
        prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
        engine.generate(prompts, params, use_tqdm=False)

    return call, {"threads": torch.get_num_threads()}


def main(kind: str, model: str, dtype: str) -> None:
    answers = _keep_standard_output()
    call, facts = {"capture": capture_calls, "bare": bare_calls}[kind](model, dtype)
    print(json.dumps(facts), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(timed(lambda asked=asked: call(asked))()), file=answers, flush=True)


def _keep_standard_output() -> TextIO:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


if __name__ == "__main__":
    main(*sys.argv[1:])
