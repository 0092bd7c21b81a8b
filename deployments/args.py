"""The application's arguments: one typed model for YAML, `serve run key=value` and Python.

A misspelt key is an error that names it. From the command line every value arrives as text, which
pydantic reads into the field's type.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from wllm_ray.capture.admission import MIN_PASS_TOKENS
from wllm_ray.coordinator import FlowLimits
from wllm_ray.dataset.stores.store import expect_lasting, open_store
from wllm_ray.errors import InvalidInputError
from wllm_ray.extraction import ExtractionLimits
from wllm_ray.plan import ShardLimits
from wllm_ray.validation import unknown_field

__all__ = ["AppArgs"]

Positive = Annotated[int, Field(ge=1)]
MIB = 1024 * 1024


class AppArgs(BaseModel):
    """Everything that the application can be told."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), hide_input_in_errors=True
    )

    model: Annotated[str, Field(description="A local model directory, or a name on the hub.")]
    served_model_name: Annotated[
        str | None, Field(description="What callers write as `model`; default: the model's name.")
    ] = None
    revision: Annotated[
        str | None,
        Field(description="Branch, tag or commit on the hub; resolved once to a commit."),
    ] = None
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Field(description="The engine's dtype; `auto` takes the model's own."),
    ] = "auto"
    precision: Annotated[
        Literal["native", "matched"],
        Field(
            description="`native`: as the model's dtype is run; `matched`: everything in IEEE "
            "float32, to compare with other implementations."
        ),
    ] = "native"
    max_model_len: Annotated[
        Positive | None, Field(description="Longest row in tokens; default: the model's own.")
    ] = None
    prefill_split_tokens: Annotated[
        int,
        Field(
            ge=MIN_PASS_TOKENS,
            description="Tokens per forward pass; longer prompts are split at its multiples.",
        ),
    ] = 1024
    prefix_caching: Annotated[
        bool,
        Field(
            description="Reuse the KV cache of equal beginnings where that drops no wanted token; "
            "the class is then `tolerance`."
        ),
    ] = False
    depth_bounded: Annotated[
        bool, Field(description="Run no block above the deepest one that is asked for.")
    ] = True
    max_num_seqs: Annotated[Positive, Field(description="Rows per forward pass.")] = 256
    threads: Annotated[
        Positive | None,
        Field(description="CPU threads per engine; 1 (the default) gives class `bitwise`."),
    ] = None
    kv_cache_memory_bytes: Annotated[
        Positive | None, Field(description="KV cache; default: as much as a full pass needs.")
    ] = None
    gpu_memory_utilization: Annotated[
        float, Field(gt=0, le=1, description="Share of the GPU's memory that the engine may use.")
    ] = 0.9
    trust_remote_code: Annotated[
        bool, Field(description="Run code that comes with the model; off unless you read it.")
    ] = False
    allow_unprofiled_vllm: Annotated[
        bool, Field(description="Try a vLLM version that was not tested, if the self-test passes.")
    ] = False
    num_gpus: Annotated[
        Literal["auto", 0, 1],
        Field(description="GPUs per replica; `auto`: 1 where the cluster has any, else 0."),
    ] = "auto"
    num_cpus: Annotated[float, Field(ge=0, description="CPUs that Ray sets aside per replica.")] = 1
    storage_root: Annotated[
        str | None,
        Field(description="Where datasets are committed: a path or URI; none: inline only."),
    ] = None
    api_key_env: Annotated[
        str, Field(description="Environment variable that holds the API key; unset: no key.")
    ] = "WLLM_API_KEY"
    max_body_bytes: Annotated[Positive, Field(description="Larger request bodies: 413.")] = 64 * MIB
    max_inline_bytes: Annotated[Positive, Field(description="Larger inline results: 413.")] = (
        64 * MIB
    )
    max_concurrent_requests: Annotated[
        Positive, Field(description="More extractions at once: 429.")
    ] = 64
    max_rows_per_shard: Annotated[Positive, Field(description="Upper bound of a shard.")] = 4096
    max_bytes_per_shard: Annotated[Positive, Field(description="Upper bound of a shard.")] = (
        64 * MIB
    )
    chunks_in_flight: Annotated[Positive, Field(description="Chunks captured at once per job.")] = 8
    shards_in_flight: Annotated[
        Positive, Field(description="Shards captured but not yet written; bounds the memory.")
    ] = 3
    chunk_deadline_s: Annotated[
        float, Field(gt=0, description="Seconds for one attempt at a chunk, waiting included.")
    ] = 600.0

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        """Pydantic's own words for a misspelt key do not say which one was meant."""
        if isinstance(values, dict):
            for name in values:
                if name not in cls.model_fields:
                    raise ValueError(unknown_field(str(name), cls.model_fields))
        return values

    @field_validator("num_gpus", mode="before")
    @classmethod
    def _number_of_gpus(cls, value: Any) -> Any:
        """From the command line, `num_gpus=1` arrives as text, which a Literal does not read."""
        return int(value) if isinstance(value, str) and value.isdigit() else value

    @field_validator("model", "storage_root")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        """Replicas run in other folders than the one where a relative path was meant."""
        if value is None or "://" in value:
            return value
        path = Path(value).expanduser()
        is_path = path.exists() or value.startswith((".", "/", "~"))
        return str(path.resolve()) if is_path else value

    @field_validator("storage_root")
    @classmethod
    def _storage_is_absolute(cls, value: str | None) -> str | None:
        """Unlike a model's name, a storage root without a scheme can only be a path.

        Raises:
            InvalidInputError: A URI that cannot be opened, or that holds a secret.
        """
        if value is None or "://" not in value:
            return None if value is None else str(Path(value).resolve())
        expect_lasting(value)
        open_store(value)
        return value

    def api_key(self) -> str | None:
        """The key from the environment; None where the variable is not set.

        Space around it, as a file may bring along, is dropped: no header could carry it.

        Raises:
            InvalidInputError: The variable is set but empty, which would mean no protection, or
                holds what a header cannot carry.
        """
        key = os.environ.get(self.api_key_env)
        if key is None:
            return None
        key = key.strip()
        if not key or not key.isascii() or not key.isprintable():
            found = "is set but empty" if not key else "holds other than printable ASCII"
            raise InvalidInputError(
                f"environment variable {self.api_key_env} {found}; unset it for no API key, or "
                "put a key in it that a header can carry",
                code="invalid_argument",
            )
        return key

    def limits(self) -> ExtractionLimits:
        """The bounds, grouped as the library takes them."""
        return ExtractionLimits(
            max_inline_bytes=self.max_inline_bytes,
            max_jobs=self.max_concurrent_requests,
            shard=ShardLimits(self.max_rows_per_shard, self.max_bytes_per_shard),
            flow=FlowLimits(
                chunks_in_flight=self.chunks_in_flight,
                shards_in_flight=self.shards_in_flight,
                chunk_deadline_s=self.chunk_deadline_s,
            ),
        )
