"""Loads a model through Transformers, or takes a loaded module, and finds out its sizes."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wllm_ray.capture.facts import dtype_name
from wllm_ray.capture.model_files import resolve_model
from wllm_ray.capture.precision import Precision, dtype_for, use_ieee_matmuls
from wllm_ray.errors import CaptureError, InvalidInputError, NotOfferedError
from wllm_ray.records import ModelIdentity

__all__ = ["LoadedModel", "ModelCall", "ModelOptions", "identity_of", "load_model", "logits_of"]

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_LENGTHS = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")
# Of a model whose configuration names no length, such as one without position embeddings.
_DEFAULT_LENGTH = 2048
# What `from_pretrained` may not be told beside the arguments of the engine itself.
_OURS = frozenset({"dtype", "torch_dtype", "revision", "trust_remote_code", "device_map"})


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a model is loaded; ``TransformersCapture`` explains each."""

    dtype: str = "auto"
    device: str | None = None
    precision: Precision = "native"
    threads: int | None = None
    max_model_len: int | None = None
    num_layers: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    trust_remote_code: bool = False
    model_args: Mapping[str, Any] = field(default_factory=dict)

    def check(self, model: str | nn.Module) -> None:
        """Refuse what cannot be, before anything is loaded or run.

        Raises:
            InvalidInputError: A size, dtype or device that cannot be used or that a loaded module
                does not have, or a module in training mode.
            NotOfferedError: A model argument that capture itself depends on, or a module spread
                over several devices.
        """
        dtype_for(self.precision, self.dtype)
        if self.dtype not in _DTYPES:
            raise InvalidInputError(
                f"dtype is one of {', '.join(_DTYPES)}, found {self.dtype!r}",
                code="invalid_argument",
            )
        for name in ("threads", "max_model_len", "num_layers", "hidden_size", "vocab_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInputError(
                    f"{name} must be at least 1, found {value}", code="invalid_argument"
                )
        if taken := sorted(self.model_args.keys() & _OURS):
            raise NotOfferedError(
                f"model_args may not set {', '.join(taken)}: capture depends on it; what can be "
                "chosen is an argument of the engine itself, and the model lies on one device",
                code="feature_not_offered",
            )
        if isinstance(model, nn.Module):
            _check_module(model, self)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run.

    Attributes:
        module: In evaluation mode, on one device.
        library: What runs it: the version of Transformers and its attention (``5.19.0+sdpa``), or
            ``torch 2.13.0`` for a module of another origin.
        dtype: That of most of its weights.
        switches_at: The length beyond which the model computes otherwise at every position (long
            RoPE), by the longest row of the pass, padding included; None where it does not.
    """

    module: nn.Module
    architecture: str
    library: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    switches_at: int | None


class ModelCall:
    """The model's ``forward`` as capture calls it: token ids alone, without a cache.

    Args:
        module: Its ``forward`` takes token ids [B, T] first.
    """

    def __init__(self, module: nn.Module) -> None:
        known = inspect.signature(module.forward).parameters
        self._module = module
        self._always = {"use_cache": False} if "use_cache" in known else {}
        # Only where nobody reads them: logits of every token may be larger than all activations.
        self._short = {"logits_to_keep": 1} if "logits_to_keep" in known else {}

    def forward(self, ids: torch.Tensor, *, all_logits: bool = False) -> Any:
        """Run the model on [B, T] token ids; returns whatever it returns."""
        options = self._always if all_logits else self._always | self._short
        return self._module(ids, **options)


def logits_of(output: Any, vocab_size: int) -> torch.Tensor | None:
    """[B, T, vocab] in what a model returned, or None where it has no head."""
    found = getattr(output, "logits", None)
    if found is None:
        found = output[0] if isinstance(output, (tuple, list)) else output
    is_tensor = isinstance(found, torch.Tensor) and found.is_floating_point()
    return found if is_tensor and found.ndim == 3 and found.shape[-1] >= vocab_size else None  # noqa: PLR2004 ([B, T, vocab])


def load_model(
    model: str | nn.Module, options: ModelOptions, *, revision: str | None
) -> LoadedModel:
    """Load a model by path or name, or take a module as it is.

    Args:
        model: A local directory, a name on a hub, or a loaded module.
        options: How.
        revision: The commit on the hub.

    Raises:
        InvalidInputError: A size that the model does not have or does not name.
        CaptureError: The model could not be loaded (``capture_failed``).
    """
    if options.threads is not None:
        # vLLM in the same process may have replaced torch's own name by one that does nothing.
        torch._C.set_num_threads(options.threads)  # noqa: SLF001
    if options.precision == "matched":
        use_ieee_matmuls()
    module = _from_pretrained(model, options, revision) if isinstance(model, str) else model
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return LoadedModel(
        module=module,
        architecture=type(module).__name__,
        library=_library(text),
        num_layers=_size("num_layers", "num_hidden_layers", options.num_layers, text),
        hidden_size=_size("hidden_size", "hidden_size", options.hidden_size, text),
        vocab_size=_size("vocab_size", "vocab_size", options.vocab_size, text),
        max_model_len=_length(options.max_model_len, text),
        dtype=_dtype_of(module),
        device=next(module.parameters()).device,
        switches_at=_switches_at(text),
    )


def identity_of(model: str | nn.Module) -> ModelIdentity:
    """Which weights these are: of files what ``resolve_model`` says, of a module a digest.

    The digest is over name, dtype, shape and bytes of every tensor in its ``state_dict``, because a
    module in memory need not be what it was loaded from.

    Raises:
        NotFoundError: Neither a directory nor something that the hub or its cache knows.
    """
    return resolve_model(model) if isinstance(model, str) else _module_identity(model)


def _module_identity(module: nn.Module) -> ModelIdentity:
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {dtype_name(tensor.dtype)} {list(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    loaded_from = str(getattr(getattr(module, "config", None), "_name_or_path", "") or "")
    # A directory's place is nobody's business; its name is enough.
    name = Path(loaded_from).name if Path(loaded_from).is_dir() else loaded_from
    return ModelIdentity(
        name=name or type(module).__name__, revision=f"sha256:{digest.hexdigest()}"
    )


def _from_pretrained(model: str, options: ModelOptions, revision: str | None) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    source: dict[str, Any] = {
        "revision": None if Path(model).is_dir() else revision,
        "trust_remote_code": options.trust_remote_code,
    }
    try:
        config = AutoConfig.from_pretrained(model, **source).get_text_config()
        args = dict(options.model_args)
        if getattr(config, "attn_logit_softcapping", None):
            # PyTorch's fused attention leaves the cap out, and Transformers says nothing.
            args.setdefault("attn_implementation", "eager")
        dtype = dtype_for(options.precision, options.dtype)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, **source, **args)
        return loaded.to(device).eval()
    except Exception as error:
        raise CaptureError(
            f"Transformers could not load the model to {device} ({type(error).__name__}); the log "
            "has more. Where it is memory, choose a smaller dtype",
            code="capture_failed",
        ) from error


def _check_module(module: nn.Module, options: ModelOptions) -> None:
    """A module belongs to its owner: it is run as it is, and not changed."""
    if module.training:
        raise InvalidInputError(
            "the module is in training mode, where dropout makes every pass another; call "
            "module.eval() first",
            code="invalid_argument",
        )
    devices = {parameter.device for parameter in module.parameters()}
    if len(devices) != 1:
        raise NotOfferedError(
            f"expected all parameters on one device, found {sorted(map(str, devices))}",
            code="parallelism_not_offered",
        )
    wanted, found = dtype_for(options.precision, options.dtype), dtype_name(_dtype_of(module))
    if wanted not in ("auto", found):
        raise InvalidInputError(
            f"the module has dtype {found}, asked for was {wanted}; convert it first, or leave "
            "dtype and precision out",
            code="invalid_argument",
        )
    device = devices.pop()
    if options.device is not None and torch.device(options.device).type != device.type:
        raise InvalidInputError(
            f"the module is on {device}, asked for was {options.device}; move it first, or leave "
            "device out",
            code="invalid_argument",
        )


def _library(config: Any) -> str:
    attention = getattr(config, "_attn_implementation", None)
    if attention is None:
        return f"torch {torch.__version__}"
    return f"{metadata.version('transformers')}+{attention}"


def _dtype_of(module: nn.Module) -> torch.dtype:
    """The dtype of most weights: a model may keep its norms in another."""
    numbers: dict[torch.dtype, int] = {}
    for parameter in module.parameters():
        if parameter.is_floating_point():
            numbers[parameter.dtype] = numbers.get(parameter.dtype, 0) + parameter.numel()
    return max(numbers, key=lambda dtype: numbers[dtype])


def _size(name: str, key: str, given: int | None, config: Any) -> int:
    found = getattr(config, key, None) if given is None else given
    if not isinstance(found, int):
        raise InvalidInputError(
            f"expected the model's configuration to name {key}, found {found!r}; pass {name}",
            code="invalid_argument",
        )
    return found


def _length(given: int | None, config: Any) -> int:
    own = next((n for key in _LENGTHS if isinstance(n := getattr(config, key, None), int)), None)
    if given is not None and own is not None and given > own:
        raise InvalidInputError(
            f"the model takes rows of up to {own} tokens, asked for was max_model_len {given}; "
            "lower it, or leave it out",
            code="invalid_argument",
        )
    return given or own or _DEFAULT_LENGTH


def _switches_at(config: Any) -> int | None:
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    edges = [
        kind.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        for kind in kinds
        if kind.get("rope_type") == "longrope"
    ]
    return next((edge for edge in edges if edge is not None), None)
