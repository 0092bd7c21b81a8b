"""Packages that only some tools need, imported when they are used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["not_installed", "require_extra"]


def require_extra(module: str, extra: str = "probe") -> Any:
    """Import a module that an extra brings.

    Raises:
        ModuleNotFoundError: It is not installed; the message says how to get it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise not_installed(error, f"pip install '.[{extra}]' in a checkout of wllm_ray") from None


def not_installed(error: ModuleNotFoundError, how: str) -> ModuleNotFoundError:
    """The same error with a message that says how to get what is missing."""
    return ModuleNotFoundError(
        f"this needs {error.name}, which is not installed: {how}", name=error.name
    )
