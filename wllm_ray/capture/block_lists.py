"""Which list of a model holds its decoder blocks."""

from __future__ import annotations

from torch import nn

from wllm_ray.capture.probe import ProbeLog
from wllm_ray.errors import CaptureError

__all__ = ["find_block_lists", "the_list_that_ran", "unknown"]


def find_block_lists(model: nn.Module, num_layers: int) -> dict[str, tuple[nn.Module, ...]]:
    """All outermost ``ModuleList`` of the right length, by dotted name: the candidates.

    Raises:
        CaptureError: There is none (code ``unknown_structure``).
    """
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    fitting = [name for name, modules in lists.items() if len(modules) == num_layers]
    outermost = [a for a in fitting if not any(a.startswith(f"{b}.") for b in fitting if b != a)]
    if not outermost:
        seen = ", ".join(f"{name} ({len(modules)})" for name, modules in lists.items())
        raise unknown(f"no list of {num_layers} decoder blocks; lists found: {seen or 'none'}")
    # Gemma 4 holds its blocks in a second list as well, under another name.
    found: dict[tuple[nn.Module, ...], str] = {}
    for name in outermost:
        found.setdefault(tuple(lists[name]), name)
    return {name: blocks for blocks, name in found.items()}


def the_list_that_ran(log: ProbeLog, blocks: dict[str, tuple[nn.Module, ...]]) -> str:
    """The one whose blocks each ran once, in order.

    Raises:
        CaptureError: There is none, or more than one (code ``unknown_structure``).
    """
    order = {name: [call.index for call in log.block_calls[name]] for name in blocks}
    ran = [name for name, calls in order.items() if calls == list(range(len(blocks[name])))]
    if len(ran) != 1:
        raise unknown(
            "expected exactly one list whose blocks each run once, in order; calls seen: "
            + "; ".join(f"{name}: {calls}" for name, calls in order.items())
        )
    return ran[0]


def unknown(message: str) -> CaptureError:
    """The error for a structure that is not understood."""
    return CaptureError(
        f"{message}. This model cannot be captured by this build", code="unknown_structure"
    )
