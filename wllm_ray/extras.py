"""Packages that only some tools need, imported when they are used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["require_extra"]


def require_extra(module: str, extra: str = "probe") -> Any:
    """Import a module that an extra brings.

    Raises:
        ModuleNotFoundError: It is not installed; the message says how to get it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"this needs {error.name}, which is not installed: pip install 'wllm-ray[{extra}]'",
            name=error.name,
        ) from None
