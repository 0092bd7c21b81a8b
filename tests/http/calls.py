"""Calling a whole application as an ASGI app, and reading its errors."""

import httpx

from tests.fakes import MODEL
from wllm_ray.digest import canonical_json
from wllm_ray.errors import ERROR_CODES
from wllm_ray.wire import JSON

PATH = "/v1/activation-datasets"
ROWS = [{"id": "a", "prompt": "one"}, {"id": "b", "prompt": "two", "metadata": {"n": 1}}]


def caller(app, **options) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app", **options)


def body(**changes) -> dict:
    return {"model": MODEL, "rows": ROWS, "layers": [1]} | changes


async def post(app, request, *, accept: str = JSON, **headers) -> httpx.Response:
    content = request if isinstance(request, bytes) else canonical_json(request)
    async with caller(app) as client:
        return await client.post(PATH, content=content, headers={"Accept": accept, **headers})


def error_of(response: httpx.Response, status: int) -> dict:
    """The error object; proves that the shape is the one that is documented."""
    assert response.status_code == status, response.text
    value = response.json()
    assert set(value) == {"error"}
    assert set(value["error"]) == {"code", "message", "stage", "details"}
    assert value["error"]["code"] in ERROR_CODES
    return value["error"]
