"""The routes. Each reads its input, calls the service, and encodes what comes back."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, get_args

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from wllm_ray._version import __version__
from wllm_ray.digest import parse_json
from wllm_ray.errors import (
    ERROR_CODES,
    ROW_FAILURE_CODES,
    OverloadedError,
    UnavailableError,
)
from wllm_ray.extraction import ExtractionService
from wllm_ray.http.guards import (
    install_error_handlers,
    read_body,
    require_api_key,
    unless_gone,
)
from wllm_ray.http.negotiation import MEDIA_TYPES, choose_media_type
from wllm_ray.offered import offered_kinds, offered_sites, site_widths
from wllm_ray.records import EngineDescription
from wllm_ray.requests import read_request
from wllm_ray.schema import (
    ActivationRequest,
    ActivationResponse,
    ExtractionSchema,
    ModelCard,
    ModelList,
    OfferedSite,
    ShardFormat,
    ShardLayout,
    StorageDtype,
)
from wllm_ray.wire import ARROW_STREAM, JSON, NPY, encode_arrow, encode_json, encode_npy

__all__ = ["build_api", "parse_request"]

_ENCODERS = {JSON: encode_json, ARROW_STREAM: encode_arrow, NPY: encode_npy}


def parse_request(body: bytes) -> ActivationRequest:
    """Decode a body strictly.

    Raises:
        InvalidInputError: Not strict JSON, or a field is wrong; the message names it.
    """
    return read_request(parse_json(body.removeprefix(codecs.BOM_UTF8)))


class _Admission:
    """Counts running extractions and turns away what is over the bound."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._running = 0

    @contextmanager
    def slot(self) -> Iterator[None]:
        if self._running >= self._bound:
            raise OverloadedError(
                f"{self._running} extractions are running, which is the bound; try again later"
            )
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1


def _model_card(service: ExtractionService[Any]) -> ModelCard:
    description = service.require_ready()
    fields = description.model_dump(
        exclude={"served_model_name", "versions", "selftest", "model", "tokenizer", "fingerprint"}
    )
    return ModelCard(
        id=description.served_model_name,
        model=description.model,
        tokenizer=description.tokenizer,
        fingerprint=description.fingerprint,
        **fields,
    )


def _extraction_schema(service: ExtractionService[Any], max_body_bytes: int) -> ExtractionSchema:
    description = service.require_ready()
    limits = service.limits
    return ExtractionSchema(
        model=description.served_model_name,
        architecture=description.architecture,
        layer_types=description.layer_types,
        sites=_sites(description),
        site_kinds=_site_kinds(description),
        positions=description.positions,
        depth_bounded=description.depth_bounded,
        precision=description.fingerprint.precision,
        capture_modes=("replay",),
        persistence=("none", "dataset", "full_trace") if service.has_store else ("none",),
        storage_dtypes=get_args(StorageDtype),
        shard_formats=get_args(ShardFormat),
        shard_layouts=get_args(ShardLayout),
        media_types=MEDIA_TYPES,
        max_body_bytes=max_body_bytes,
        max_inline_bytes=limits.max_inline_bytes,
        max_rows_per_shard=limits.shard.max_rows,
        max_bytes_per_shard=limits.shard.max_bytes,
        row_failure_codes={code: entry[2] for code, entry in ROW_FAILURE_CODES.items()},
        error_codes=dict(ERROR_CODES),
        selftest=description.selftest,
    )


def _sites(description: EngineDescription) -> tuple[OfferedSite, ...]:
    sites = offered_sites(description)
    return tuple(
        OfferedSite(name=str(site), kind=site.kind, layer=site.layer, width=width)
        for site, width in zip(sites, site_widths(description, sites), strict=True)
    )


def _site_kinds(description: EngineDescription) -> dict[str, tuple[int, ...] | None]:
    """Kind → the layers that have it, or None where it belongs to no layer."""
    layers: dict[str, list[int]] = {kind: [] for kind in offered_kinds(description)}
    for support in description.sites:
        layers[support.kind] += support.layers or ()
    return {kind: tuple(sorted(found)) or None for kind, found in layers.items()}


def _add_probes(app: FastAPI, is_ready: Callable[[], bool]) -> None:
    @app.get("/livez", summary="This process answers")
    async def livez() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/readyz", summary="At least one replica has passed its self-test")
    async def readyz() -> dict[str, str]:
        if not is_ready():
            raise UnavailableError(
                "no replica has passed its self-test yet; models take a while to load"
            )
        return {"status": "ready"}


def _add_descriptions(app: FastAPI, service: ExtractionService[Any], max_body_bytes: int) -> None:
    @app.get("/v1/models", summary="What is served, with the identity of its weights")
    async def models() -> ModelList:
        return ModelList(data=[_model_card(service)])

    @app.get("/v1/extraction-schema", summary="What may be asked of this application")
    async def extraction_schema() -> ExtractionSchema:
        return _extraction_schema(service, max_body_bytes)


def _add_extraction(
    app: FastAPI, service: ExtractionService[Any], max_body_bytes: int, admission: _Admission
) -> None:
    async def answer(request: Request) -> Response:
        media_type = choose_media_type(", ".join(request.headers.getlist("accept")))
        body = await read_body(request, max_body_bytes)
        parsed = await asyncio.to_thread(parse_request, body)
        if parsed.persistence != "none":
            reference = await service.extract_dataset(parsed)
            return JSONResponse(reference.model_dump(mode="json"))
        work = service.extract_inline(parsed, as_one_array=media_type == NPY)
        inline = await unless_gone(request, work)
        return Response(
            await asyncio.to_thread(_ENCODERS[media_type], inline), media_type=media_type
        )

    @app.post(
        "/v1/activation-datasets",
        summary="Capture activations of rows, inline or as a committed dataset",
        response_model=ActivationResponse,
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {JSON: {"schema": ActivationRequest.model_json_schema()}},
            }
        },
    )
    async def activation_datasets(request: Request) -> Response:
        with admission.slot():
            return await answer(request)


def build_api(
    service: ExtractionService[Any],
    *,
    is_ready: Callable[[], bool],
    api_key: str | None = None,
    max_body_bytes: int = 64 * 1024 * 1024,
    max_concurrent_requests: int = 64,
) -> FastAPI:
    """The HTTP application over a service.

    Args:
        service: Does the work.
        is_ready: Whether a replica has passed its self-test; must return at once.
        api_key: The key that callers must send, or None for no key.
        max_body_bytes: Larger bodies are refused with 413.
        max_concurrent_requests: More extractions at once are refused with 429.
    """
    app = FastAPI(title="wllm_ray", version=__version__)
    install_error_handlers(app)
    require_api_key(app, api_key)
    _add_probes(app, is_ready)
    _add_descriptions(app, service, max_body_bytes)
    _add_extraction(app, service, max_body_bytes, _Admission(max_concurrent_requests))
    return app
