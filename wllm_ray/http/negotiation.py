"""Which form an answer takes, from the request's Accept header (RFC 9110, section 12.5.1)."""

from __future__ import annotations

from wllm_ray.errors import NotAcceptableError
from wllm_ray.wire import ARROW_STREAM, JSON, NPY

__all__ = ["MEDIA_TYPES", "choose_media_type"]

# In order of preference where the caller accepts several equally.
MEDIA_TYPES = (JSON, ARROW_STREAM, NPY)


def _quality(parameters: list[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


def _matches(pattern: str, media_type: str) -> int:
    """How specifically a media range names a type: 0 not at all, 3 exactly."""
    if pattern == media_type:
        return 3
    if pattern == media_type.partition("/")[0] + "/*":
        return 2
    return 1 if pattern == "*/*" else 0


def choose_media_type(accept: str | None) -> str:
    """The offered type that the header prefers; JSON where there is no header.

    Raises:
        NotAcceptableError: The header accepts none of :data:`MEDIA_TYPES`.
    """
    ranges = []
    for part in (accept or "*/*").split(","):
        pattern, *parameters = part.split(";")
        ranges.append((pattern.strip().lower(), _quality(parameters)))
    best, best_quality = None, 0.0
    for media_type in MEDIA_TYPES:
        hits = [(m, q) for p, q in ranges if (m := _matches(p, media_type))]
        quality = max(hits)[1] if hits else 0.0
        if quality > best_quality:
            best, best_quality = media_type, quality
    if best is None:
        raise NotAcceptableError(f"the Accept header names none of {', '.join(MEDIA_TYPES)}")
    return best
