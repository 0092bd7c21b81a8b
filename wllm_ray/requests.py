"""Understanding a request: after :func:`prepare`, only the work itself can fail."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

from pydantic import ValidationError

from wllm_ray.errors import InvalidInputError, NotFoundError, NotOfferedError
from wllm_ray.offered import offered_sites, site_widths
from wllm_ray.positions import (
    PositionLike,
    canonical_position,
    feature_rows_of,
    position_kind,
)
from wllm_ray.records import (
    CaptureIdentity,
    CaptureTask,
    EngineDescription,
    RowRecord,
    TokenRow,
)
from wllm_ray.rows import parse_objects
from wllm_ray.schema import ActivationRequest, ModelCard, StorageOptions
from wllm_ray.sites import HookSite, resolve_sites
from wllm_ray.tokens import Tokenizer, TokenLimits, tokenize_rows
from wllm_ray.validation import field_problems, not_offered

__all__ = [
    "Prepared",
    "Selection",
    "Served",
    "capture_task",
    "identity_of",
    "prepare",
    "read_request",
    "select",
    "traced",
]

# What a replica says of itself, or what a client was told of it.
Served: TypeAlias = EngineDescription | ModelCard

GENERATED_POSITIONS = ("all_generated", "last_generated")


@dataclass(frozen=True, slots=True)
class Selection:
    """What is captured of every row.

    Attributes:
        sites: Resolved, in the order asked for.
        site_widths: Width of each of them on the served model.
        position: Canonical.
        identity: What all rows have in common.
    """

    sites: tuple[HookSite, ...]
    site_widths: tuple[int, ...]
    position: str
    identity: CaptureIdentity

    def feature_rows(self, row: RowRecord) -> int:
        """How many feature rows a row gives; none where it has no ids and cannot be run."""
        return 0 if row.token_ids is None else self.feature_rows_at(len(row.token_ids))

    def feature_rows_at(self, tokens: int) -> int:
        """How many feature rows a prompt of this many tokens gives."""
        rows = feature_rows_of(self.position, tokens)
        assert rows is not None, "positions of generated tokens are not offered"
        return rows


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that has been understood.

    Attributes:
        request: As it was sent.
        description: The engine that will run it.
        selection: What is captured of every row.
        rows: All rows in request order; those that cannot be run carry their failure.
        timings: Seconds by phase, filled as the work goes on.
    """

    request: ActivationRequest
    description: EngineDescription
    selection: Selection
    rows: list[RowRecord]
    timings: dict[str, float]


def read_request(value: Any) -> ActivationRequest:
    """Check a decoded request against the schema.

    Raises:
        NotOfferedError: A field asks for what this product does not do; the message says what to
            do instead.
        InvalidInputError: A field is missing, wrong or unknown; the message names it.
    """
    try:
        return ActivationRequest.model_validate(value)
    except ValidationError as error:
        _refuse_what_is_not_offered(error)
        problems = field_problems(error, ActivationRequest)
        listed = "; ".join(f"{p['field']}: {p['message']}" for p in problems)
        raise InvalidInputError(
            f"the request does not match the schema: {listed}",
            stage="parse_rows",
            details={"problems": problems},
        ) from None


def _refuse_what_is_not_offered(error: ValidationError) -> None:
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        if item["type"] != "extra_forbidden":
            continue
        name = str(item["loc"][0])
        if refused := not_offered(name):
            code, message = refused
            details = {"field": name}
            raise NotOfferedError(message, code=code, stage="parse_rows", details=details) from None


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
    position: PositionLike,
    capture_mode: str = "replay",
) -> Selection:
    """Resolve what is asked against what is served; the same on both sides of HTTP.

    Raises:
        InvalidInputError: A site, layer or position that cannot be.
        NotOfferedError: A site or position that is not captured here, a mixer kind on a block of
            another type for example; the message names the layer and its type.
    """
    canonical = canonical_position(position)
    _check_position(canonical, served.positions)
    resolved = resolve_sites(layers, site, sites, num_layers=served.num_layers)
    widths = site_widths(served, resolved)
    identity = identity_of(served, resolved, canonical, capture_mode)
    return Selection(resolved, widths, canonical, identity)


def _check_position(position: str, offered: Sequence[str]) -> None:
    kind = position_kind(position)
    if kind in offered:
        return
    why = (
        ", since it needs generation and only prompts are run here"
        if kind in GENERATED_POSITIONS
        else " here"
    )
    raise NotOfferedError(
        f"position {kind!r} is not offered{why}; offered: {', '.join(offered)}",
        code="position_not_offered",
    )


def traced(served: Served, selection: Selection) -> Selection:
    """What is captured of rows whose traces are kept: every offered site at every token.

    The rows stay those of the request: their identity, and so their digests, do not change.
    """
    sites = offered_sites(served)
    return replace(
        selection, sites=sites, site_widths=site_widths(served, sites), position="all_prompt"
    )


def capture_task(selection: Selection, rows: Sequence[RowRecord]) -> CaptureTask:
    """What a replica needs of some rows; those without ids are left out."""
    wanted = tuple(TokenRow(row.index, row.token_ids) for row in rows if row.token_ids is not None)
    return CaptureTask(sites=selection.sites, position=selection.position, rows=wanted)


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
    return Prepared(request, description, selection, rows, timings)


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
    _check_storage(request)


def _check_storage(request: ActivationRequest) -> None:
    """Refuse what is said of a dataset where none is asked for."""
    if request.persistence != "none":
        return
    plain, asked = StorageOptions(), request.storage
    said = [
        one.name for one in fields(plain) if getattr(asked, one.name) != getattr(plain, one.name)
    ]
    said += ["dataset_id"] if request.dataset_id is not None else []
    if said:
        raise InvalidInputError(
            f"{', '.join(said)}: said of a dataset, and persistence `none` makes none; ask for "
            f"persistence `dataset`, or leave it out (inline features are float32)",
            stage="parse_rows",
            details={"fields": said},
        )
