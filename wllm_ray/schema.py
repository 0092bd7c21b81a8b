"""What crosses HTTP and handles: requests and responses, as pydantic models.

An unknown field is an error that names it. Rows are checked by :func:`wllm_ray.rows.parse_rows`,
which reports every bad row at once, so they stay plain JSON here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from wllm_ray.records import (
    Fingerprint,
    ModelIdentity,
    RowFailure,
    SelfTestReport,
    TokenizerIdentity,
)

__all__ = [
    "DATASET_ID_PATTERN",
    "ActivationRequest",
    "ActivationResponse",
    "DatasetReference",
    "ExtractionSchema",
    "ModelCard",
    "ModelList",
    "RowResult",
]

# Also the reader's rule: a dataset id is one plain path component.
DATASET_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
# No model comes near; longer numbers would only be echoed in errors.
MAX_LAYER = 999_999
DatasetId = Annotated[str, StringConstraints(pattern=DATASET_ID_PATTERN)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ActivationRequest(_Message):
    """Body of ``POST /v1/activation-datasets`` and argument of the handle's ``extract``."""

    model: str
    rows: list[Any]
    layers: list[Annotated[int, Field(ge=0, le=MAX_LAYER)]] | None = None
    site: str = "block"
    sites: list[str] | None = None
    position: str = "last_prompt"
    capture_mode: Literal["replay", "online"] = "replay"
    persistence: Literal["none", "dataset", "full_trace"] = "none"
    batch_size: Annotated[int, Field(ge=1, le=4096)] | Literal["auto"] = "auto"
    dataset_id: DatasetId | None = None
    storage_dtype: Literal["float32", "native", "float16"] = "float32"
    shard_format: Literal["npy", "arrow"] = "npy"
    rows_per_shard: Annotated[int, Field(ge=1, le=1_048_576)] | None = None


class RowResult(_Message):
    """One input row in the answer: where its activation is, or why there is none.

    ``offset`` and ``length`` count feature rows of the answer's features; ``offset`` is None
    where the row failed.
    """

    id: str
    index: int
    offset: int | None
    length: int
    request_sha256: str
    token_ids: list[int] | None
    token_sha256: str | None
    failure: RowFailure | None


class DatasetReference(_Message):
    """A committed dataset: its id, its digests and what it holds, never its bytes."""

    dataset_id: str
    manifest_sha256: str
    content_sha256: str
    rows: int
    rows_failed: int
    shards: int


class ActivationResponse(_Message):
    """Answer of ``POST /v1/activation-datasets``.

    For JSON, ``features`` is the nested list [feature row][site][hidden]. For an Arrow stream the
    same object without ``features`` and ``rows`` is the schema metadata ``wllm_ray.response``, and
    rows and features are columns.
    """

    model: ModelIdentity
    tokenizer: TokenizerIdentity
    axes: tuple[str, ...]
    sites: tuple[str, ...]
    position: str
    capture_mode: str
    shape: tuple[int, ...]
    dtype: str
    rows: list[RowResult]
    features: list[list[list[float]]] | None
    dataset: DatasetReference | None
    fingerprint: Fingerprint
    versions: dict[str, str]
    selftest: SelfTestReport
    timings: dict[str, float]


class ModelCard(_Message):
    """One served model, with what a client needs to plan and to compute request digests."""

    id: str
    object: Literal["model"] = "model"
    model: ModelIdentity
    tokenizer: TokenizerIdentity
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    site_kinds: tuple[str, ...]
    positions: tuple[str, ...]
    fingerprint: Fingerprint


class ModelList(_Message):
    """Answer of ``GET /v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ExtractionSchema(_Message):
    """Answer of ``GET /v1/extraction-schema``: what may be asked, from this replica's evidence."""

    model: str
    architecture: str
    sites: list[str]
    site_kinds: tuple[str, ...]
    positions: tuple[str, ...]
    capture_modes: tuple[str, ...]
    persistence: tuple[str, ...]
    storage_dtypes: tuple[str, ...]
    shard_formats: tuple[str, ...]
    media_types: tuple[str, ...]
    max_body_bytes: int
    max_inline_bytes: int
    max_rows_per_shard: int
    max_bytes_per_shard: int
    row_failure_codes: dict[str, str]
    error_codes: dict[str, str]
    selftest: SelfTestReport
