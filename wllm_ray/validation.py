"""What is wrong with a value that a pydantic model refused, one line per field, for people.

The fields are described from the model's JSON schema, so a union reads "a whole number from 1 to
4096, or 'auto'" instead of one message per branch. Values may be prompts, so none but numbers is
quoted unless the caller knows better. Fields by which people ask for what this product does not do
are known by name, and the answer says what to do instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

__all__ = ["field_problems", "not_offered", "unknown_field"]

_LONGEST_NUMBER = 10**12
_WORDS = {
    "boolean": "true or false",
    "null": "null",
    "object": "an object",
    "string": "a string",
}
_TYPES = {str: "a string", list: "a list", tuple: "a list", dict: "an object", type(None): "null"}


class _Thing(NamedTuple):
    """What is not done here, the fields by which people ask for it, and what to do instead."""

    code: str
    fields: str
    instead: str


_NOT_OFFERED = (
    _Thing(
        code="feature_not_offered",
        fields="attention attentions attention_weights attention_pattern attn_weights "
        "output_attentions",
        instead="attention weights are not captured, since the engine's kernels never form them; "
        "ask for the sites attn_out or attn_out_prelinear, or run Transformers with "
        "output_attentions",
    ),
    _Thing(
        code="feature_not_offered",
        fields="intervention interventions steering steering_vector steering_vectors patch patches "
        "activation_patching ablate ablation ablations",
        instead="activations are read and never changed; capture them here, and intervene with a "
        "hook on the model in Transformers",
    ),
    _Thing(
        code="feature_not_offered",
        fields="lora lora_request lora_name lora_path lora_modules enable_lora adapter adapters",
        instead="adapters are not applied; merge the adapter into the weights and serve the merged "
        "model",
    ),
    _Thing(
        code="feature_not_offered",
        fields="speculative speculative_config speculative_model num_speculative_tokens "
        "draft_model",
        instead="there is no speculative decoding, which would change nothing that is captured of "
        "a prompt; leave the field out",
    ),
    _Thing(
        code="parallelism_not_offered",
        fields="tensor_parallel_size pipeline_parallel_size tensor_parallel pipeline_parallel "
        "tp_size pp_size",
        instead="capture runs on one GPU per replica; serve more replicas, or a smaller model or "
        "dtype",
    ),
)


def not_offered(name: str) -> tuple[str, str] | None:
    """Whether a field that does not exist asks for something that this product does not do.

    Returns:
        (error code, what to say), or None.
    """
    for thing in _NOT_OFFERED:
        if name.lower() in thing.fields.split():
            return thing.code, f"{name!a} is not offered: {thing.instead}"
    return None


def unknown_field(name: str, fields: Iterable[str]) -> str:
    """What to say of a field that does not exist: what to do instead, or which may be meant."""
    if refused := not_offered(name):
        return refused[1]
    known = list(fields)
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"; did you mean {close[0]!r}?" if close else "."
    return f"unknown field {name!a}{meant} The fields are {', '.join(known)}"


def field_problems(
    error: ValidationError, model: type[BaseModel], *, quoting: bool = False
) -> list[dict[str, str]]:
    """``{"field", "message"}`` of every field that is wrong, in the order found.

    Args:
        error: What validating against ``model`` raised.
        model: Fields are described from its schema.
        quoting: Values may be quoted, since they are no prompts.
    """
    schema = model.model_json_schema()
    problems: dict[str, str] = {}
    for item in error.errors(include_url=False, include_context=False):
        path = _path(item["loc"])
        field = ".".join(map(str, path)) or "body"
        found = f"{item['input']!a:.80}" if quoting else _found(item["input"])
        problems.setdefault(field, _message(item, path, schema, found))
    return [{"field": field, "message": message} for field, message in problems.items()]


def _path(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The field and its indices; what follows are pydantic's names for branches of a union."""
    return (*loc[:1], *(part for part in loc[1:] if isinstance(part, int)))


def _message(item: Any, path: tuple[int | str, ...], schema: dict[str, Any], found: str) -> str:
    if item["type"] == "extra_forbidden":
        return unknown_field(str(path[0]), schema["properties"])
    if item["type"] == "missing":
        return "is missing"
    if item["type"] == "value_error":
        return str(item["msg"]).removeprefix("Value error, ")
    wanted = _described(_at(path, schema)) or str(item["msg"])
    return f"expected {wanted}, found {found}"


def _at(path: tuple[int | str, ...], schema: dict[str, Any]) -> dict[str, Any]:
    """The part of the schema that describes a path."""
    found: dict[str, Any] = schema if not path else schema["properties"][path[0]]
    for _ in path[1:]:
        branches = found.get("anyOf", [found])
        found = next((branch["items"] for branch in branches if "items" in branch), {})
    return found


def _described(schema: dict[str, Any]) -> str:
    """A schema in words; nothing where it has none."""
    if "anyOf" in schema:
        branches = [_described(branch) for branch in schema["anyOf"]]
        return ", or ".join(text for text in branches if text and text != "null")
    if "const" in schema:
        return repr(schema["const"])
    if "enum" in schema:
        return f"one of {', '.join(map(repr, schema['enum']))}"
    kind = schema.get("type", "")
    if kind in ("integer", "number"):
        return ("a whole number" if kind == "integer" else "a number") + _range(schema)
    if kind == "array":
        return "a list"
    pattern = f" that matches {schema['pattern']}" if "pattern" in schema else ""
    return _WORDS.get(kind, "") + pattern


def _range(schema: dict[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f" from {low} to {high}"
    parts = []
    if low is not None:
        parts.append(f"of at least {low}")
    if (above := schema.get("exclusiveMinimum")) is not None:
        parts.append(f"above {above}")
    if high is not None:
        parts.append(f"of at most {high}")
    return f" {' and '.join(parts)}" if parts else ""


def _found(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)) and abs(value) < _LONGEST_NUMBER:
        return str(value)
    return _TYPES.get(type(value), f"a {type(value).__name__}")
