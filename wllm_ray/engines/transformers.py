"""Transformers in this process, for people: the reference, and the way without vLLM."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from torch import nn

from wllm_ray.capture.model_files import resolve_model
from wllm_ray.capture.precision import Precision
from wllm_ray.capture.tokenizer import TransformersTokenizer
from wllm_ray.capture.transformers_batches import SequencesPerCall
from wllm_ray.capture.transformers_capture import TransformersCapture
from wllm_ray.capture.transformers_model import identity_of
from wllm_ray.engines.base import ActivationEngine
from wllm_ray.engines.device import DeviceActivations, capture_on_device
from wllm_ray.engines.options import refuse
from wllm_ray.engines.tokenizers import LoadedTokenizer, NoTokenizer
from wllm_ray.engines.wanted import Sites
from wllm_ray.inputs import Input, input_rows
from wllm_ray.positions import PositionLike
from wllm_ray.records import ModelIdentity
from wllm_ray.tokens import Tokenizer

__all__ = ["TransformersEngine", "TransformersOptions", "load_transformers"]


class TransformersOptions(TypedDict, total=False):
    """How the engine is built; ``TransformersCapture`` explains each."""

    served_model_name: str | None
    dtype: str
    device: str | None
    precision: Precision
    max_model_len: int | None
    sequences_per_call: SequencesPerCall
    depth_bounded: bool
    threads: int | None
    num_layers: int | None
    hidden_size: int | None
    vocab_size: int | None
    model_args: Mapping[str, Any] | None
    selftest: bool
    progress_limit_s: float


def load_transformers(
    model: str | os.PathLike[str] | nn.Module,
    *,
    tokenizer: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    **options: Unpack[TransformersOptions],
) -> tuple[TransformersCapture, Tokenizer]:
    """A started engine for token ids, and the tokenizer that makes them.

    Args:
        model: A local directory, a name on a hub, or a loaded decoder in evaluation mode.
        tokenizer: As ``AutoTokenizer.from_pretrained`` gives it; default: the model's own, or none
            for a module.
        revision: A branch, tag or commit on the hub.
        trust_remote_code: Run code that comes with the model and its tokenizer.
        options: How the engine is built.

    Raises:
        NotFoundError: No such model.
        NotOfferedError: An option that is not offered, or a module on several devices.
        InvalidInputError: An option that does not exist or cannot be used.
        CaptureError: The engine could not be built, or its self-test failed.
    """
    refuse(options, TransformersOptions.__annotations__)
    source = model if isinstance(model, nn.Module) else os.fspath(model)
    identity = (
        identity_of(source) if isinstance(source, nn.Module) else resolve_model(source, revision)
    )
    made = _tokenizer(source, identity, tokenizer, trust_remote_code=trust_remote_code)
    engine = TransformersCapture(
        source,
        model_identity=identity,
        tokenizer_identity=made.identity,
        trust_remote_code=trust_remote_code,
        **options,
    )
    return engine, made


def _tokenizer(
    model: str | nn.Module, identity: ModelIdentity, given: Any, *, trust_remote_code: bool
) -> Tokenizer:
    if given is not None:
        return LoadedTokenizer(given)
    if isinstance(model, nn.Module):
        return NoTokenizer()
    return TransformersTokenizer(model, identity, trust_remote_code=trust_remote_code)


class TransformersEngine(ActivationEngine):
    """A model in Transformers, or any decoder module, in this process.

    ::

        with TransformersEngine(model, tokenizer=tokenizer, sites="L6_attn_out") as engine:
            found = engine.extract_device(["The sea is", "The sky is"])
            found.features  # [2, 768], on the model's device

    Args:
        model: A local directory, a name on a hub, or a loaded decoder in evaluation mode, which is
            run as it is and not changed.
        sites: What to read where a call does not say; default: the stream after the last block.
        layers: Zero-based blocks that ``site`` applies to.
        site: The site kind for ``layers``; ``block`` is ``resid_post``.
        position: Which tokens of each input.
        tokenizer: As ``AutoTokenizer.from_pretrained`` gives it; default: the model's own. A module
            without one takes token ids only.
        revision: A branch, tag or commit on the hub.
        trust_remote_code: Run code that comes with the model and its tokenizer.
        options: How the engine is built, see :class:`TransformersOptions`.

    Raises:
        NotFoundError: No such model.
        InvalidInputError: A site, layer, position or option that cannot be.
        NotOfferedError: Something that this product does not do; the message says what to do
            instead.
        CaptureError: The engine could not be built, or its self-test failed.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | nn.Module,
        sites: Sites | None = None,
        *,
        layers: int | Sequence[int] | None = None,
        site: str = "block",
        position: PositionLike = "last_prompt",
        tokenizer: Any = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        **options: Unpack[TransformersOptions],
    ) -> None:
        refuse(options, TransformersOptions.__annotations__)
        super().__init__(
            lambda: load_transformers(
                model,
                tokenizer=tokenizer,
                revision=revision,
                trust_remote_code=trust_remote_code,
                **options,
            ),
            sites,
            layers=layers,
            site=site,
            position=position,
        )

    def extract_device(
        self,
        inputs: Iterable[Input],
        sites: Sites | None = None,
        position: PositionLike | None = None,
        *,
        row_ids: Iterable[str] | None = None,
        metadata: Iterable[Mapping[str, Any]] | None = None,
    ) -> DeviceActivations:
        """As :meth:`extract`, but the values stay on the model's device and in its dtype.

        Rows that cannot be run are in ``failures``, as there.

        Raises:
            InvalidInputError: The inputs, sites or position cannot be understood; nothing was run.
            NotOfferedError: Something that is not captured here.
            CaptureError: The engine failed, or a row that it ran has no activation.
        """
        calls = self._calls(self._select(sites, position), self._batching)
        rows = calls.tokenize(input_rows(inputs, row_ids, metadata))
        assert isinstance(self._engine, TransformersCapture), "made by load_transformers"
        return capture_on_device(self._engine, calls, rows)
