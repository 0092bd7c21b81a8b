"""What an engine records about the machine and the libraries that it runs on."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch

from wllm_ray._version import __version__

__all__ = ["batch_invariant", "device_name", "dtype_name", "library_versions", "vllm_version"]

# Extensions that change which matrix kernels run, beyond what PyTorch's capability name tells.
_KERNEL_FLAGS = ("avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "bf16", "sve", "sve2")

# Asked of the installation, not imported: the library never imports Ray.
_LIBRARIES = ("transformers", "numpy", "pyarrow", "pydantic", "ray")


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def device_name(device: torch.device) -> str:
    """What the numbers depend on: a GPU's name, or a CPU's instruction set."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    found = torch.cpu.get_capabilities()
    flags = [flag for flag in _KERNEL_FLAGS if found.get(flag)]
    return " ".join(
        ["cpu", platform.machine(), torch.backends.cpu.get_cpu_capability().lower(), *flags]
    )


def batch_invariant() -> bool:
    """Whether vLLM's batch-invariant mode is on: a GPU's bits then do not depend on the batch."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") == "1"


def vllm_version() -> str:
    """The vLLM that is loaded."""
    import vllm

    return str(vllm.__version__)


def library_versions(vllm: str | None = None) -> dict[str, str]:
    """The versions that enter a manifest; what is not installed is left out.

    Args:
        vllm: That of the engine, where it is vLLM.
    """
    found = {
        "wllm_ray": __version__,
        "vllm": vllm,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,  # None in a build for CPUs
        **{name: _installed(name) for name in _LIBRARIES},
        "python": platform.python_version(),
    }
    return {name: version for name, version in found.items() if version is not None}


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
