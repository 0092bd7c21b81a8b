"""Tokenizers beside a model's own: one that the caller has loaded already, or none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wllm_ray.capture.tokenizer import TransformersTokenizer
from wllm_ray.digest import canonical_json, sha256_hex
from wllm_ray.errors import InvalidInputError
from wllm_ray.records import TokenizerIdentity

__all__ = ["LoadedTokenizer", "NoTokenizer"]


def _name(name_or_path: str) -> str:
    """A hub name as it is; of a directory, which is nobody's business, the last part."""
    is_directory = bool(name_or_path) and Path(name_or_path).is_dir()
    return Path(name_or_path).resolve().name if is_directory else name_or_path


class LoadedTokenizer(TransformersTokenizer):
    """A tokenizer of Transformers that the caller has loaded.

    Args:
        tokenizer: As ``AutoTokenizer.from_pretrained`` gives it. It may have been changed since,
            so its revision is a digest of its rules as they are now.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        template = tokenizer.chat_template
        self._identity = TokenizerIdentity(
            name=_name(tokenizer.name_or_path) or type(tokenizer).__name__,
            revision=f"sha256:{sha256_hex(_serialised(tokenizer))}",
            chat_template_sha256=sha256_hex(template.encode()) if template else None,
        )


def _serialised(tokenizer: Any) -> bytes:
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else tokenizer.get_vocab()
    return canonical_json([type(tokenizer).__name__, special, rules])


class NoTokenizer:
    """Stands in where a module was given without a tokenizer: only token ids can be run."""

    identity = TokenizerIdentity(
        name="none: rows are token ids", revision="none", chat_template_sha256=None
    )

    def encode_prompts(self, _prompts: Sequence[str]) -> list[list[int]]:
        """Refuse.

        Raises:
            InvalidInputError: Always.
        """
        raise _no_tokenizer()

    def encode_messages(self, _messages: Sequence[dict[str, Any]]) -> list[int]:
        """Refuse; without a template, messages are refused row by row before this.

        Raises:
            InvalidInputError: Always.
        """
        raise _no_tokenizer()


def _no_tokenizer() -> InvalidInputError:
    return InvalidInputError(
        "the engine was given a module without a tokenizer, so text cannot be read; pass "
        "`tokenizer=`, a name, a path or a loaded one, or send token_ids",
        code="invalid_argument",
    )
