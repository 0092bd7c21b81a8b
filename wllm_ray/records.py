"""The frozen records that the steps hand to each other, inside and between processes.

``parse_rows`` makes :class:`InputRow`, ``tokenize_rows`` turns them into :class:`RowRecord`,
``plan_chunks`` groups those into :class:`Chunk`, ``capture`` answers with
:class:`CapturedChunk`, ``stage_shard`` writes them. None of these does I/O or changes later.

What there is one of for every row is a named tuple where nothing forbids it: a frozen dataclass
takes three times as long to make. Their ``index`` hides a method of tuples that nobody needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from wllm_ray.digest import canonical_json, parse_json, sha256_hex
from wllm_ray.errors import ROW_FAILURE_CODES
from wllm_ray.lazy import lazy
from wllm_ray.sites import HookSite

__all__ = [
    "CaptureIdentity",
    "CaptureTask",
    "CapturedChunk",
    "Chunk",
    "EngineDescription",
    "Fingerprint",
    "InputRow",
    "ModelIdentity",
    "RowFailure",
    "RowOutline",
    "RowRecord",
    "SelfTestReport",
    "SiteSupport",
    "TokenRow",
    "TokenizerIdentity",
]


class Record(BaseModel):
    """A frozen record that is written to JSON; an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, ignored_types=(lazy,)
    )


class RowFailure(Record):
    """Why one row has no activation.

    ``permanent`` failures are a function of row and model and are reported again on every run;
    transient ones are retried.
    """

    stage: str
    code: str
    message: str
    permanent: bool

    @classmethod
    def of(cls, code: str, message: str) -> RowFailure:
        """Build a failure from a code of :data:`wllm_ray.errors.ROW_FAILURE_CODES`."""
        stage, permanent, _ = ROW_FAILURE_CODES[code]
        return cls(stage=stage, code=code, message=message, permanent=permanent)


class ModelIdentity(Record):
    """Which weights: a name for people and an immutable revision for digests.

    ``revision`` is a commit on a hub, or ``sha256:…`` over the files of a local directory.
    ``requested_revision`` keeps the branch or tag that was asked for apart from it.
    """

    name: str
    revision: str
    requested_revision: str | None = None


class TokenizerIdentity(Record):
    """Which tokenizer, and which options turn text into ids.

    ``raw_prompt`` and ``chat`` say in words what is done; the template's digest is over its exact
    UTF-8 text.
    """

    name: str
    revision: str
    chat_template_sha256: str | None
    raw_prompt: str = "tokenizer default (add_special_tokens=True)"
    chat: str = "chat template with generation prompt (add_special_tokens=False)"


class Fingerprint(Record):
    """What could change the numbers. Equal fingerprints, equal bytes, in class ``bitwise``."""

    model_revision: str
    tokenizer_revision: str
    engine: str
    engine_version: str
    engine_dtype: str
    precision: str
    device: str
    threads: int | None
    prefill_split_tokens: int
    reproducibility: Literal["bitwise", "tolerance"]

    @property
    def digest(self) -> str:
        """SHA-256 over the canonical JSON of all fields."""
        return sha256_hex(canonical_json(self.model_dump()))


class SelfTestReport(Record):
    """What the self-test found when this replica started.

    Attributes:
        passed: All checks held.
        checks: One line per check: name → what was found, in words and numbers.
        reproducibility: The class that was established.
        measured_relative_l2: The largest relative L2 distance between the same row captured
            alone, in a batch and in prefill chunks; 0.0 means equal to the bit.
        prompt_lengths: Token counts of the probe prompts.
        residual: How the residual stream is read off a block's output.
        seconds: How long it took.
    """

    passed: bool
    checks: dict[str, str]
    reproducibility: Literal["bitwise", "tolerance"]
    measured_relative_l2: float
    prompt_lengths: tuple[int, ...]
    residual: str
    seconds: float


class SiteSupport(Record):
    """A site kind, the decoder blocks that have it, and its width there.

    ``layers`` is None for the kinds that belong to no block. A kind occurs more than once where
    blocks differ in width.
    """

    kind: str
    layers: tuple[int, ...] | None
    width: int


class EngineDescription(Record):
    """What a replica says of itself: enough to plan, to digest and to record.

    Attributes:
        layer_types: For each decoder block, what it is made of: ``attention + mlp``, ``mamba`` …
        sites: What can be captured, from evidence gathered when this engine started.
        depth_bounded: Whether passes stop at the deepest block asked for; else all blocks run.
    """

    served_model_name: str
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
    versions: dict[str, str]
    selftest: SelfTestReport


class CaptureIdentity(Record):
    """The part of a row's identity that the whole request has in common.

    Its canonical JSON enters every request digest.
    """

    model_revision: str
    tokenizer_revision: str
    chat_template_sha256: str | None
    sites: tuple[str, ...]
    position: str
    capture_mode: str


@dataclass(frozen=True, slots=True)
class InputRow:
    """One input as its owner wrote it, already checked by :mod:`wllm_ray.rows`.

    ``content`` holds exactly one of ``prompt``, ``messages`` and ``token_ids``; ``metadata_json``
    is canonical.
    """

    id: str
    content: dict[str, Any]
    metadata_json: str = "{}"

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata, read anew each time."""
        metadata: dict[str, Any] = parse_json(self.metadata_json)
        return metadata


class RowOutline(NamedTuple):
    """What of a row decides how rows fall into shards, as a :class:`RowRecord` has it."""

    request_digest: str
    tokens_bound: int


class RowRecord(NamedTuple):
    """One row of a dataset before its activation is known.

    ``index`` counts all input rows, failed ones included. ``tokens_bound`` is how many tokens the
    row may have, as its content alone tells, so that everybody plans alike. ``token_ids`` is None
    where the row failed before it had any (``failure`` says why), or where another machine
    tokenises; ``source`` is then what that machine is sent.
    """

    index: int  # type: ignore[assignment]
    id: str
    metadata_json: str
    request_digest: str
    tokens_bound: int
    token_ids: NDArray[np.int32] | None
    failure: RowFailure | None
    source: InputRow | None = None


class TokenRow(NamedTuple):
    """What a replica needs of a row: where it belongs, and its ids."""

    index: int  # type: ignore[assignment]
    token_ids: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class CaptureTask:
    """One chunk's worth of work for an engine; ``position`` is canonical."""

    sites: tuple[HookSite, ...]
    position: str
    rows: tuple[TokenRow, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A contiguous run of rows of one shard, sent to one replica in one call."""

    shard: int
    rows: tuple[RowRecord, ...]

    @property
    def first_row(self) -> int:
        """Index of the first row."""
        return self.rows[0].index


@dataclass(frozen=True, slots=True)
class CapturedChunk:
    """What an engine returns for a chunk.

    Attributes:
        row_index: [R] int64, the rows' indices, ascending; failed rows included.
        lengths: [R] int64, feature rows per row; 0 where the row failed.
        features: [sum(lengths), sum(widths)] float32, C order; good rows in ``row_index`` order,
            the sites side by side.
        widths: Width of each site, in the order of the task.
        failures: Row index → why.
        description: The engine that ran it.
        timings: Seconds by phase.
        recaptured: Positions that were captured again after pre-emption; the first stands.
        token_ids: Row index → ids, only where this side did not have them (HTTP capture).
    """

    row_index: NDArray[np.int64]
    lengths: NDArray[np.int64]
    features: NDArray[np.float32]
    widths: tuple[int, ...]
    failures: dict[int, RowFailure]
    description: EngineDescription
    timings: dict[str, float]
    recaptured: int = 0
    token_ids: dict[int, NDArray[np.int32]] = field(default_factory=dict)
