"""The served model's own tokenizer, loaded through Transformers, with a recorded policy.

Raw prompts get the tokenizer's default special tokens. Conversations are rendered with the chat
template and a generation prompt, then encoded without special tokens, since the template writes
its own: adding them twice would shift every position by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wllm_ray.capture.model_files import directory_digest, tokenizer_files
from wllm_ray.digest import sha256_hex
from wllm_ray.errors import InvalidInputError
from wllm_ray.records import ModelIdentity, TokenizerIdentity
from wllm_ray.tokens import ChatTemplateRefusedError

__all__ = ["TransformersTokenizer"]


class TransformersTokenizer:
    """Implements :class:`wllm_ray.tokens.Tokenizer`.

    Args:
        model: A local directory, or a name on the hub.
        identity: The model that it belongs to.
        trust_remote_code: Run tokenizer code that comes with the model.
    """

    def __init__(
        self, model: str, identity: ModelIdentity, *, trust_remote_code: bool = False
    ) -> None:
        local = Path(model).is_dir()
        revision = None if local else identity.revision
        self._tokenizer = _load(model, revision, trust_remote_code=trust_remote_code)
        template = self._tokenizer.chat_template
        self._identity = TokenizerIdentity(
            name=identity.name,
            revision=_revision(model, identity) if local else identity.revision,
            chat_template_sha256=sha256_hex(template.encode()) if template else None,
        )

    @property
    def identity(self) -> TokenizerIdentity:
        """Name, revision and template digest."""
        return self._identity

    def encode_prompts(self, prompts: Sequence[str]) -> list[list[int]]:
        """Ids of raw prompts, with the tokenizer's default special tokens; never truncated."""
        encoded = self._tokenizer(
            list(prompts),
            padding=False,
            truncation=False,
            verbose=False,
            return_attention_mask=False,
        )
        return [list(ids) for ids in encoded["input_ids"]]

    def encode_messages(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Ids of a conversation, rendered with a generation prompt.

        Raises:
            ChatTemplateRefusedError: The template raised.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            raise ChatTemplateRefusedError from error
        ids = self._tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)
        return list(ids["input_ids"])


def _load(model: str, revision: str | None, *, trust_remote_code: bool) -> Any:
    """Transformers' tokenizer; where there is none, it raises or makes up an empty one."""
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(
            model, revision=revision, trust_remote_code=trust_remote_code
        )
    except ValueError as error:
        raise _no_tokenizer(_shown(model)) from error
    if len(found) <= len(found.all_special_tokens):
        raise _no_tokenizer(_shown(model))
    return found


def _shown(model: str) -> str:
    """What to call a model in a message: a directory by its own name alone."""
    return Path(model).name if Path(model).is_dir() else model


def _no_tokenizer(name: str) -> InvalidInputError:
    return InvalidInputError(
        f"model {name!r} has no tokenizer that Transformers can load; put its files "
        "(tokenizer.json, tokenizer_config.json) beside the weights",
        code="invalid_argument",
    )


def _revision(model: str, identity: ModelIdentity) -> str:
    files = tokenizer_files(Path(model))
    return directory_digest(files, Path(model)) if files else identity.revision
