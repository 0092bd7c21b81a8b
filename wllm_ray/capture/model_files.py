"""Which files a model is: a name or a path, resolved once to something that does not move."""

from __future__ import annotations

import hashlib
from pathlib import Path

from wllm_ray.digest import canonical_json, sha256_hex
from wllm_ray.errors import NotFoundError
from wllm_ray.records import ModelIdentity

__all__ = ["directory_digest", "resolve_model", "tokenizer_files"]

_TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "spiece.model",
)


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def directory_digest(files: list[Path], root: Path) -> str:
    """``sha256:…`` over the canonical JSON of [relative name, size, SHA-256] of each file."""
    entries = [
        [path.relative_to(root).as_posix(), path.stat().st_size, _file_digest(path)]
        for path in sorted(files)
    ]
    return f"sha256:{sha256_hex(canonical_json(entries))}"


def _model_files(root: Path) -> list[Path]:
    """All files but hidden ones, which tools leave behind and no loader reads."""
    return [
        path
        for path in root.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]


def tokenizer_files(root: Path) -> list[Path]:
    """The files in a local model directory that decide how text becomes ids."""
    return sorted({path for pattern in _TOKENIZER_PATTERNS for path in root.glob(pattern)})


def resolve_model(model: str, revision: str | None = None) -> ModelIdentity:
    """Resolve a local directory to the digest of its files, or a hub name to a commit.

    Args:
        model: A directory, or a name on the hub.
        revision: A branch, tag or commit on the hub.

    Raises:
        NotFoundError: Neither a directory nor something that the hub or its cache knows.
    """
    root = Path(model)
    if root.is_dir():
        if not (root / "config.json").is_file():
            raise NotFoundError(
                f"expected a model directory with config.json, found none in {model}",
                code="model_not_found",
            )
        return ModelIdentity(
            name=root.resolve().name, revision=directory_digest(_model_files(root), root)
        )
    return ModelIdentity(
        name=model, revision=_hub_commit(model, revision), requested_revision=revision
    )


def _hub_commit(model: str, revision: str | None) -> str:
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, HTTPError, OfflineModeIsEnabled

    cached = None
    try:
        cached = try_to_load_from_cache(model, "config.json", revision=revision)
        commit: str | None = HfApi().model_info(model, revision=revision).sha
    # The first is what the hub's HTTP client raises, also where nobody answers: no OSError then.
    except (HTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
        # Without the hub, what lies in its cache is what will be loaded.
        if isinstance(cached, str):
            return Path(cached).parent.name
        raise NotFoundError(
            f"expected a local directory or a model of the hub, found neither for {model!r} "
            f"({type(error).__name__}); check the path, or the network and the name",
            code="model_not_found",
        ) from error
    if commit is None:
        raise NotFoundError(f"the hub names no commit for {model!r}", code="model_not_found")
    return commit
