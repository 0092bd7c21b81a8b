"""What crosses HTTP and handles: requests and responses, as pydantic models.

An unknown field is an error that names it. Rows are checked by :func:`wllm_ray.rows.parse_rows`,
which reports every bad row at once, so they stay plain JSON here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from wllm_ray.errors import InvalidInputError
from wllm_ray.records import (
    Fingerprint,
    ModelIdentity,
    RowFailure,
    SelfTestReport,
    SiteSupport,
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
    "OfferedSite",
    "RowResult",
    "ShardFormat",
    "ShardLayout",
    "StorageDtype",
    "StorageOptions",
]

# Also the reader's rule: a dataset id is one plain path component.
DATASET_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
# No model comes near; longer numbers would only be echoed in errors.
MAX_LAYER = 999_999
DatasetId = Annotated[str, StringConstraints(pattern=DATASET_ID_PATTERN)]
ShardLayout: TypeAlias = Literal["auto", "stacked", "per_site"]
ShardFormat: TypeAlias = Literal["npy", "arrow"]
StorageDtype: TypeAlias = Literal["float32", "native", "float16"]


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """How a dataset is stored; all of it enters the dataset's spec.

    Attributes:
        rows_per_shard: At most so many rows in a shard; None for what the application says.
        shard_layout: ``stacked``: one file of all sites; ``per_site``: one file for each;
            ``auto``: stacked where all are of one width.
        shard_format: ``npy`` or ``arrow``; both are memory-mapped when they are read.
        storage_dtype: ``float32``; ``native``: as the engine computed, bfloat16 as its 16 bits;
            ``float16``: rounded, and a row with a value that does not fit fails.
        mixed_fingerprints: Shards may come from engines that may differ numerically; what each
            came from is recorded.
        full_trace: Keep every offered site at every token of the good rows beside the features.
    """

    rows_per_shard: int | None = None
    shard_layout: ShardLayout = "auto"
    shard_format: ShardFormat = "npy"
    storage_dtype: StorageDtype = "float32"
    mixed_fingerprints: bool = False
    full_trace: bool = False

    @classmethod
    def of(cls, given: StorageOptions | None) -> StorageOptions:
        """What was given, or the defaults.

        Raises:
            InvalidInputError: Something else was given (``invalid_argument``).
        """
        if given is not None and not isinstance(given, cls):
            raise InvalidInputError(
                f"storage is StorageOptions(…), for example "
                f"StorageOptions(storage_dtype='native'); found {given!a:.80}",
                code="invalid_argument",
            )
        return given or cls()

    def __post_init__(self) -> None:
        """Refuse what is no such option.

        Raises:
            InvalidInputError: Code ``invalid_argument``.
        """
        offered = {
            "shard_layout": get_args(ShardLayout),
            "shard_format": get_args(ShardFormat),
            "storage_dtype": get_args(StorageDtype),
        }
        for name, values in offered.items():
            if getattr(self, name) not in values:
                raise InvalidInputError(
                    f"{name} is one of {', '.join(values)}; found {getattr(self, name)!a}",
                    code="invalid_argument",
                )
        rows = self.rows_per_shard
        if rows is not None and (type(rows) is not int or rows < 1):
            raise InvalidInputError(
                f"rows_per_shard is a whole number from 1; found {rows!a}", code="invalid_argument"
            )


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ActivationRequest(_Message):
    """Body of ``POST /v1/activation-datasets`` and argument of the handle's ``extract``."""

    model: str
    rows: list[Any]
    layers: list[Annotated[int, Field(ge=0, le=MAX_LAYER)]] | None = None
    site: str = "block"
    sites: list[str] | None = None
    position: Annotated[
        str | dict[str, Any],
        Field(
            description="last_prompt, first, all_prompt, mean_prompt, index:0,-1, or "
            '{"index": [0, -1]}; negative indices count from the end of the prompt.'
        ),
    ] = "last_prompt"
    capture_mode: Literal["replay", "online"] = "replay"
    persistence: Literal["none", "dataset", "full_trace"] = "none"
    batch_size: Annotated[int, Field(ge=1, le=4096)] | Literal["auto"] = "auto"
    dataset_id: DatasetId | None = None
    storage_dtype: StorageDtype = "float32"
    shard_format: ShardFormat = "npy"
    shard_layout: Annotated[
        ShardLayout,
        Field(
            description="One array of all sites, or one file per site; auto stacks sites that are "
            "equally wide."
        ),
    ] = "auto"
    rows_per_shard: Annotated[int, Field(ge=1, le=1_048_576)] | None = None
    mixed_fingerprints: Annotated[
        bool,
        Field(
            description="Let shards come from engines that may differ numerically; recorded with "
            "each shard."
        ),
    ] = False

    @property
    def storage(self) -> StorageOptions:
        """How the dataset is stored."""
        return StorageOptions(
            rows_per_shard=self.rows_per_shard,
            shard_layout=self.shard_layout,
            shard_format=self.shard_format,
            storage_dtype=self.storage_dtype,
            mixed_fingerprints=self.mixed_fingerprints,
            full_trace=self.persistence == "full_trace",
        )


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
    """A committed dataset: its id, its digests and what it holds, never its bytes.

    ``shards_superseded`` is of the run that this answers: how many shards it captured that another
    attempt had written first, with other numbers. Those that were written first count.
    """

    dataset_id: str
    manifest_sha256: str
    content_sha256: str
    rows: int
    rows_failed: int
    shards: int
    shards_superseded: int = 0


class ActivationResponse(_Message):
    """Answer of ``POST /v1/activation-datasets``.

    For JSON, ``features`` is the nested list [feature row][site][hidden], as long at each site as
    ``site_widths`` says. For an Arrow stream the same object without ``features`` and ``rows`` is
    the schema metadata ``wllm_ray.response``, and rows and features are columns.

    ``shape`` is (feature rows, sites, hidden), the last None where the sites differ in width.
    """

    model: ModelIdentity
    tokenizer: TokenizerIdentity
    axes: tuple[str, ...]
    sites: tuple[str, ...]
    site_widths: tuple[int, ...]
    position: str
    capture_mode: str
    shape: tuple[int, int, int | None]
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
    layer_types: tuple[str, ...]
    sites: tuple[SiteSupport, ...]
    positions: tuple[str, ...]
    depth_bounded: bool
    fingerprint: Fingerprint


class ModelList(_Message):
    """Answer of ``GET /v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class OfferedSite(_Message):
    """One hook site that may be asked for, by its canonical name."""

    name: str
    kind: str
    layer: int | None
    width: int


class ExtractionSchema(_Message):
    """Answer of ``GET /v1/extraction-schema``: what may be asked, from this replica's evidence.

    Attributes:
        layer_types: For each decoder block, what it is made of.
        sites: Every hook site, kind by kind.
        site_kinds: Kind → the layers that have it, or None where it belongs to no layer.
        depth_bounded: Whether passes stop at the deepest block asked for.
        precision: How this replica computes: ``native`` or ``matched``.
    """

    model: str
    architecture: str
    layer_types: tuple[str, ...]
    sites: tuple[OfferedSite, ...]
    site_kinds: dict[str, tuple[int, ...] | None]
    positions: tuple[str, ...]
    depth_bounded: bool
    precision: str
    capture_modes: tuple[str, ...]
    persistence: tuple[str, ...]
    storage_dtypes: tuple[str, ...]
    shard_formats: tuple[str, ...]
    shard_layouts: tuple[str, ...]
    media_types: tuple[str, ...]
    max_body_bytes: int
    max_inline_bytes: int
    max_rows_per_shard: int
    max_bytes_per_shard: int
    row_failure_codes: dict[str, str]
    error_codes: dict[str, str]
    selftest: SelfTestReport
