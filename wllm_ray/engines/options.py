"""Options of engines: those that there are, and what to do instead of those that there are not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from wllm_ray.errors import InvalidInputError, NotOfferedError
from wllm_ray.validation import not_offered, unknown_field

__all__ = ["refuse"]


def refuse(options: Mapping[str, Any], known: Iterable[str] = ()) -> None:
    """Refuse options that are not ``known``; does nothing where there are none.

    Raises:
        NotOfferedError: One asks for what this product does not do: attention weights,
            interventions, LoRA, speculative decoding, parallelism inside an engine. The message
            says what to do instead.
        InvalidInputError: One does not exist; the message names the one that may be meant.
    """
    names = list(known)
    for name in options:
        if name in names:
            continue
        if refused := not_offered(name):
            code, message = refused
            raise NotOfferedError(message, code=code, details={"field": name})
        raise InvalidInputError(unknown_field(name, names), code="invalid_argument")
