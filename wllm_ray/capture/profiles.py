"""The vLLM versions that capture was tested with."""

from __future__ import annotations

from wllm_ray.errors import NotOfferedError

__all__ = ["TESTED_VLLM", "check_vllm_version"]

# Release → what was run with it. The catalogue in vllm_worker.py was read in these versions.
TESTED_VLLM: dict[str, str] = {"0.32.0": "V1 and V2 model runners on CPU"}


def check_vllm_version(version: str, *, allow_unprofiled: bool) -> str:
    """Return the tested release, or ``unprofiled`` where that was allowed.

    Args:
        version: ``vllm.__version__``, with or without a local part such as ``+cpu``.
        allow_unprofiled: Accept a version without a profile; the self-test must then pass.

    Raises:
        NotOfferedError: The version has no profile (code ``vllm_version_not_offered``).
    """
    release = version.partition("+")[0]
    if release in TESTED_VLLM:
        return release
    if allow_unprofiled:
        return "unprofiled"
    raise NotOfferedError(
        f"vLLM {version} was not tested with this build; tested: {', '.join(TESTED_VLLM)}. "
        "Install one of these, or pass allow_unprofiled_vllm=True and rely on the self-test",
        code="vllm_version_not_offered",
    )
