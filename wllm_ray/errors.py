"""The exception tree and the catalogue of codes.

::

    WLLMError
    ├── InvalidInputError  (ValueError)         what was asked cannot be understood; nothing was run
    │   └── NotOfferedError                     understood, but not a thing that this product does
    │       └── NotAcceptableError              no form of answer that the caller accepts
    ├── NotFoundError  (LookupError)            a model or dataset that is not here
    ├── ConflictError                           the same dataset id with another identity
    ├── TooLargeError                           a body or a result over its configured bound
    ├── UnauthorizedError  (PermissionError)    no API key, or the wrong one
    ├── UnavailableError                        try again later: starting, replica lost
    │   └── OverloadedError                     try again later: too many requests are waiting
    ├── RowsFailedError                         transient row failures are left: run again
    ├── CaptureError                            the engine, a hook or the self-test
    ├── StorageError  (OSError)                 the storage root refused or lost a write
    │   └── AlreadyExistsError (FileExistsError)  create-only met an object that was there
    └── IntegrityError  (ValueError)            the bytes are not what their record says

An exception is about a whole request, file or dataset. What is wrong with one row is data, not an
exception: :class:`wllm_ray.records.RowFailure`.

Every error carries a ``code`` from :data:`ERROR_CODES`; codes are append-only. The message says
what was expected, what was found, where, and what to do next; it never holds prompt text or keys.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "ERROR_CODES",
    "ROW_FAILURE_CODES",
    "AlreadyExistsError",
    "CaptureError",
    "ConflictError",
    "IntegrityError",
    "InvalidInputError",
    "NotAcceptableError",
    "NotFoundError",
    "NotOfferedError",
    "OverloadedError",
    "RowsFailedError",
    "StorageError",
    "TooLargeError",
    "UnauthorizedError",
    "UnavailableError",
    "WLLMError",
    "error_class",
]

ROW_FAILURE_CODES: dict[str, tuple[str, bool, str]] = {
    # Each code with its stage, whether it is permanent, and its meaning.
    "empty_prompt": ("tokenize", True, "The prompt or the message list is empty."),
    "zero_tokens": ("tokenize", True, "The row has no token at all."),
    "too_long": ("tokenize", True, "The row has more tokens than the model takes."),
    "token_out_of_vocabulary": ("tokenize", True, "A token id is outside the embedding."),
    "position_out_of_range": ("tokenize", True, "An index position is outside the row."),
    "lone_surrogate": ("tokenize", True, "The text holds half of a surrogate pair."),
    "no_chat_template": ("tokenize", True, "Messages, but the tokenizer has no chat template."),
    "chat_template_error": ("tokenize", True, "The chat template refused the messages."),
    "position_missing": ("capture", False, "A wanted position was not captured."),
    "position_repeated": ("capture", False, "A position was captured twice, differently."),
    "unexpected_rows": ("capture", False, "The engine returned rows that nobody asked for."),
    "token_mismatch": ("capture", False, "The engine ran other token ids than were sent."),
    "hook_failed": ("capture", False, "A hook raised while it read the row."),
    "engine_failed": ("capture", False, "The engine ended the row without finishing it."),
    "replica_lost": ("capture", False, "The replica died with the row in flight."),
    "deadline_exceeded": ("capture", False, "The chunk ran past its deadline."),
    "non_finite": ("capture", True, "The activation holds NaN or infinity."),
    "all_zero": ("capture", True, "The activation is zero throughout."),
    "poisonous": ("capture", True, "Three engines died with this row alone in flight."),
    "storage_overflow": ("stage", True, "A value does not fit the storage dtype."),
}


class WLLMError(Exception):
    """Base of every error that this package raises on purpose.

    Args:
        message: What was expected, what was found, where, and what to do.
        code: A key of :data:`ERROR_CODES`; the class's own default where omitted.
        stage: The step that failed, named as in ``parse_rows → … → verify``.
        details: JSON-able facts for programs.
    """

    default_code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    retry_after_s: ClassVar[int | None] = None

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        stage: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        if self.code not in ERROR_CODES:
            raise KeyError(f"error code {self.code!r} is not in ERROR_CODES")
        self.stage = stage
        self.details = details or {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep code, stage and details when the error crosses a process border."""
        return _rebuild, (type(self), self.message, self.code, self.stage, self.details)

    def to_json(self) -> dict[str, Any]:
        """The error as the HTTP surface shows it: ``{error: {code, message, stage, details}}``."""
        return {
            "error": {
                "code": self.code,
                "message": self.message,
                "stage": self.stage,
                "details": self.details,
            }
        }


def _rebuild(
    kind: type[WLLMError], message: str, code: str, stage: str | None, details: dict[str, Any]
) -> WLLMError:
    return kind(message, code=code, stage=stage, details=details)


class InvalidInputError(WLLMError, ValueError):
    """What was asked cannot be understood; nothing was run."""

    default_code = "invalid_request"
    http_status = 422


class NotOfferedError(InvalidInputError):
    """Understood, but not a thing that this build or deployment does."""

    default_code = "feature_not_offered"


class NotAcceptableError(NotOfferedError):
    """No form of answer that the caller accepts."""

    default_code = "media_type_not_offered"
    http_status = 406


class NotFoundError(WLLMError, LookupError):
    """A model, dataset or route that is not here."""

    default_code = "dataset_not_found"
    http_status = 404

    def __str__(self) -> str:
        return self.message


class ConflictError(WLLMError):
    """The same dataset id with another identity, or a root that cannot tell."""

    default_code = "dataset_conflict"
    http_status = 409


class TooLargeError(WLLMError):
    """A body or an inline result over its configured bound."""

    default_code = "result_too_large"
    http_status = 413


class UnauthorizedError(WLLMError, PermissionError):
    """The API key is missing or wrong."""

    default_code = "unauthorized"
    http_status = 401

    def __str__(self) -> str:
        return self.message


class UnavailableError(WLLMError):
    """Not now: starting, overloaded, a replica lost, a deadline passed."""

    default_code = "not_ready"
    http_status = 503
    retry_after_s = 5


class OverloadedError(UnavailableError):
    """Too many requests are waiting already."""

    default_code = "overloaded"
    http_status = 429


class RowsFailedError(WLLMError):
    """Transient row failures are left, so nothing was committed; running again retries them."""

    default_code = "rows_failed"
    http_status = 503
    retry_after_s = 5


class CaptureError(WLLMError):
    """The engine, a hook or the self-test failed for more than one row."""

    default_code = "capture_failed"


class StorageError(WLLMError, OSError):
    """The storage root failed to read, write or list."""

    default_code = "storage_failed"

    def __str__(self) -> str:
        return self.message


class AlreadyExistsError(StorageError, FileExistsError):
    """A create-only write met an object that was there before."""

    default_code = "already_exists"


class IntegrityError(WLLMError, ValueError):
    """The bytes are not what their record says."""

    default_code = "manifest_invalid"


_CODES: dict[type[WLLMError], dict[str, str]] = {
    InvalidInputError: {
        "invalid_request": "The request body does not match the schema; details name the field.",
        "invalid_json": "The text is not strict JSON (syntax, duplicate key, NaN or Infinity).",
        "invalid_rows": "Some input rows are malformed; details list each line with its reason.",
        "no_rows": "The input holds no row at all.",
        "invalid_site": "A hook site that cannot be parsed, or is listed twice.",
        "invalid_position": "A position that cannot be parsed, or lists an index twice.",
        "position_out_of_range": "An index position is outside the row.",
        "layer_out_of_range": "A layer that the model does not have.",
        "invalid_argument": "An argument has a value that cannot be used.",
    },
    NotOfferedError: {
        "site_not_offered": "A known site that this build does not capture on this model.",
        "position_not_offered": "A known position that this build does not capture.",
        "capture_mode_not_offered": "`online` capture where the application runs activations only.",
        "persistence_not_offered": "A persistence that this deployment does not offer.",
        "storage_dtype_not_offered": "The engine computes in a dtype that is not stored as it is.",
        "parallelism_not_offered": "Tensor or pipeline parallelism above 1 together with capture.",
        "feature_not_offered": "What is not done here; the message says what to do instead.",
        "vllm_version_not_offered": "A vLLM version without a profile, and no permission to try.",
        "failures_not_representable": "npy carries no row failures, and there are some.",
        "widths_not_representable": "One array holds one width, and the sites differ in width.",
    },
    NotAcceptableError: {
        "media_type_not_offered": "The Accept header names no form that this route can answer in.",
    },
    NotFoundError: {
        "model_not_found": "No such model is served here.",
        "application_not_found": "No Serve application of this name runs on the cluster.",
        "dataset_not_found": "No committed dataset has this id under this root.",
        "object_not_found": "The storage root holds no object under this key.",
        "route_not_found": "No such route, or not with this method.",
    },
    ConflictError: {
        "dataset_conflict": "This dataset id already stands for something else.",
        "dataset_immutable": "The dataset is committed, and the request differs from it.",
        "dataset_abandoned": "The dataset was begun, and given up before it was committed.",
        "mixed_fingerprints": "Shards of a dataset come from engines that may differ numerically.",
        "single_writer_root": "The storage root does not honour create-only writes.",
    },
    TooLargeError: {
        "body_too_large": "The request body is over the configured bound.",
        "result_too_large": "The inline result is over the configured bound.",
    },
    UnauthorizedError: {
        "unauthorized": "The API key is missing or wrong.",
    },
    UnavailableError: {
        "not_ready": "No replica has passed its self-test yet.",
        "replica_lost": "The replica that held the chunk died, and retries are used up.",
        "engine_died_alone": "The engine died while it ran a chunk alone; the chunk is suspect.",
        "deadline_exceeded": "The work did not finish within its deadline.",
        "server_unreachable": "The server did not answer.",
        "deploy_failed": "The application failed to start; the message quotes its log.",
    },
    OverloadedError: {
        "overloaded": "Too many requests are waiting; Retry-After says when to come back.",
    },
    RowsFailedError: {
        "rows_failed": "Some rows failed for reasons that may pass; running again retries them.",
    },
    CaptureError: {
        "capture_failed": "The engine or a hook failed; the message says where.",
        "engine_dead": "The engine stopped working and the replica must be replaced.",
        "unknown_structure": "The model's blocks return something that is not understood.",
        "self_test_failed": "The self-test found a capture that is not right.",
        "protocol_error": "The server's answer does not match the request.",
    },
    StorageError: {
        "storage_failed": "The storage root failed to read, write or list.",
        "storage_not_configured": "The operation needs a storage root and none is configured.",
    },
    AlreadyExistsError: {
        "already_exists": "The object exists already, with other bytes.",
    },
    IntegrityError: {
        "manifest_invalid": "A manifest, spec or receipt is not strict JSON of the right shape.",
        "format_unknown": "The format or version is not one that this reader knows.",
        "digest_mismatch": "The bytes have another SHA-256 than their record.",
        "size_mismatch": "The file has another size than its record.",
        "file_missing": "A file that a record names is not there.",
        "name_invalid": "A file name is not a plain name inside the dataset's own folder.",
        "array_invalid": "An array has the wrong shape, dtype, order or header.",
        "table_invalid": "A row table has the wrong columns, types or ranges.",
        "rows_inconsistent": "Rows, offsets, digests or counts contradict each other.",
        "values_not_finite": "The stored features hold NaN or infinity.",
    },
    WLLMError: {
        "internal_error": "A fault of this program; the log has the cause.",
    },
}
ERROR_CODES: dict[str, str] = {
    code: meaning for codes in _CODES.values() for code, meaning in codes.items()
}
_BY_CODE = {code: kind for kind, codes in _CODES.items() for code in codes}


def error_class(code: str) -> type[WLLMError]:
    """The class whose errors carry a code; the base class for one that is not known."""
    return _BY_CODE.get(code, WLLMError)
