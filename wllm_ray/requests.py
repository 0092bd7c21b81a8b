"""Understanding a request: after :func:`prepare`, only the work itself can fail."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic import ValidationError

from wllm_ray.errors import InvalidInputError, NotFoundError, NotOfferedError
from wllm_ray.records import (
    CaptureIdentity,
    CaptureTask,
    EngineDescription,
    RowRecord,
    TokenRow,
)
from wllm_ray.rows import parse_objects
from wllm_ray.schema import ActivationRequest, ModelCard
from wllm_ray.sites import HookSite, resolve_sites
from wllm_ray.tokens import Tokenizer, TokenLimits, tokenize_rows
from wllm_ray.validation import field_problems

__all__ = [
    "Prepared",
    "Selection",
    "Served",
    "canonical_position",
    "capture_task",
    "identity_of",
    "prepare",
    "read_request",
    "select",
]

# What a replica says of itself, or what a client was told of it.
Served: TypeAlias = EngineDescription | ModelCard

_POSITION_ALIASES = {"last-prompt": "last_prompt"}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that has been understood.

    Attributes:
        request: As it was sent.
        description: The engine that will run it.
        identity: What all its rows have in common.
        sites: Resolved, in the order asked for.
        position: Canonical.
        rows: All rows in request order; those that cannot be run carry their failure.
        timings: Seconds by phase, filled as the work goes on.
    """

    request: ActivationRequest
    description: EngineDescription
    identity: CaptureIdentity
    sites: tuple[HookSite, ...]
    position: str
    rows: list[RowRecord]
    timings: dict[str, float]


@dataclass(frozen=True, slots=True)
class Selection:
    """What is captured of every row: resolved sites and position, and the identity they give."""

    sites: tuple[HookSite, ...]
    position: str
    identity: CaptureIdentity


def read_request(value: Any) -> ActivationRequest:
    """Check a decoded request against the schema.

    Raises:
        InvalidInputError: A field is missing, wrong or unknown; the message names it.
    """
    try:
        return ActivationRequest.model_validate(value)
    except ValidationError as error:
        problems = field_problems(error, ActivationRequest)
        listed = "; ".join(f"{p['field']}: {p['message']}" for p in problems)
        raise InvalidInputError(
            f"the request does not match the schema: {listed}",
            stage="parse_rows",
            details={"problems": problems},
        ) from None


def canonical_position(position: str, offered: Sequence[str]) -> str:
    """The stored spelling of a position.

    Raises:
        NotOfferedError: Not one of ``offered`` (code ``position_not_offered``).
    """
    name = _POSITION_ALIASES.get(position, position)
    if name not in offered:
        raise NotOfferedError(
            f"position {position!r} is not offered; offered: {', '.join(offered)}",
            code="position_not_offered",
        )
    return name


def identity_of(
    served: Served, sites: Sequence[HookSite], position: str, capture_mode: str
) -> CaptureIdentity:
    """The part of every row's identity that the request fixes."""
    return CaptureIdentity(
        model_revision=served.model.revision,
        tokenizer_revision=served.tokenizer.revision,
        chat_template_sha256=served.tokenizer.chat_template_sha256,
        sites=tuple(str(site) for site in sites),
        position=position,
        capture_mode=capture_mode,
    )


def select(
    served: Served,
    *,
    layers: Sequence[int] | None,
    site: str,
    sites: Sequence[str] | None,
    position: str,
    capture_mode: str = "replay",
) -> Selection:
    """Resolve what is asked against what is served; the same on both sides of HTTP.

    Raises:
        InvalidInputError: A site or layer that cannot be.
        NotOfferedError: A site kind or position that is not captured here.
    """
    resolved_position = canonical_position(position, served.positions)
    resolved = resolve_sites(layers, site, sites, num_layers=served.num_layers)
    _check_sites(resolved, served)
    identity = identity_of(served, resolved, resolved_position, capture_mode)
    return Selection(resolved, resolved_position, identity)


def capture_task(
    sites: tuple[HookSite, ...], position: str, rows: Sequence[RowRecord]
) -> CaptureTask:
    """What a replica needs of some rows; those without ids are left out."""
    wanted = tuple(TokenRow(row.index, row.token_ids) for row in rows if row.token_ids is not None)
    return CaptureTask(sites=sites, position=position, rows=wanted)


def prepare(
    request: ActivationRequest, description: EngineDescription, tokenizer: Tokenizer
) -> Prepared:
    """Check a request against what is served, then parse and tokenise its rows.

    Raises:
        NotFoundError: Another model is served (code ``model_not_found``).
        InvalidInputError: The request cannot be understood, or asks for what is not offered.
    """
    _check_offered(request, description)
    selection = select(
        description,
        layers=request.layers,
        site=request.site,
        sites=request.sites,
        position=request.position,
        capture_mode=request.capture_mode,
    )
    started = time.perf_counter()
    rows = tokenize_rows(
        parse_objects(request.rows),
        tokenizer,
        selection.identity,
        TokenLimits(description.max_model_len, description.vocab_size),
    )
    timings = {"tokenize_s": time.perf_counter() - started}
    return Prepared(
        request,
        description,
        selection.identity,
        selection.sites,
        selection.position,
        rows,
        timings,
    )


def _check_offered(request: ActivationRequest, description: EngineDescription) -> None:
    if request.model != description.served_model_name:
        raise NotFoundError(
            f"model {request.model!r} is not served here; served: "
            f"{description.served_model_name!r}",
            code="model_not_found",
        )
    if request.capture_mode != "replay":
        raise NotOfferedError(
            "capture_mode `online` needs generation, and this application runs activations only; "
            "ask for `replay`",
            code="capture_mode_not_offered",
        )
    if request.persistence == "full_trace":
        raise NotOfferedError(
            "persistence `full_trace` is not offered; ask for `dataset`",
            code="persistence_not_offered",
        )
    if request.storage_dtype != "float32":
        raise NotOfferedError(
            f"storage_dtype {request.storage_dtype!r} is not offered; ask for `float32`",
            code="storage_dtype_not_offered",
        )
    if request.shard_format != "npy":
        raise NotOfferedError(
            f"shard_format {request.shard_format!r} is not offered; ask for `npy`",
            code="shard_format_not_offered",
        )


def _check_sites(sites: Sequence[HookSite], served: Served) -> None:
    for site in sites:
        if site.kind not in served.site_kinds:
            raise NotOfferedError(
                f"hook site {site} is not offered on {served.architecture}; offered kinds: "
                f"{', '.join(served.site_kinds)}",
                code="site_not_offered",
            )
