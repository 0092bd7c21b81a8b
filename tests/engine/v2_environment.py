"""Import this first, in a program of its own: it makes vLLM take its second model runner on a CPU.

That runner is the GPU's own routing code. It needs Triton's interpreter before vLLM is imported.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import triton.backends


class _Driver:
    @staticmethod
    def is_active():
        return True


class _Backend:
    driver = _Driver
    compiler = None


triton.backends.backends["cpu"] = _Backend
