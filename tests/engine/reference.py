"""Transformers' own values at every site: one prompt at a time, no padding, hooks on its modules.

``hidden_states[-1]`` has passed the final norm, so the blocks themselves are hooked. Nothing here
uses wllm_ray or vLLM.
"""

from contextlib import ExitStack
from functools import cache

import numpy as np
import torch
from layouts import STRUCTURES
from tiny_configs import LAYERS
from transformers import AutoModelForCausalLM


class _Rows:
    """Parts of what ``sites`` returns."""

    def rows_at(self, token_ids, positions):
        """[positions, layers, hidden] float32: each block's output there."""
        found = self.sites(token_ids)
        outputs = [found[f"L{layer}_resid_post"] for layer in range(LAYERS)]
        return np.stack([rows[positions] for rows in outputs], axis=1)

    def all_sites(self, prompts):
        """Site name → [tokens of all prompts, width]."""
        found = [self.sites(prompt) for prompt in prompts]
        return {name: np.concatenate([one[name] for one in found]) for name in found[0]}

    def all_rows(self, prompts):
        """[prompts, layers, hidden]: each block's output at the last token."""
        return np.concatenate([self.rows_at(prompt, [-1]) for prompt in prompts])


class Reference(_Rows):
    """A tiny model of one of ``tiny_configs.FAMILIES`` as Transformers runs it."""

    def __init__(self, path, family, dtype="float32"):
        self.structure = STRUCTURES[family]
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation=self.structure.attention
        ).eval()
        ((name, self.blocks),) = (
            (name, module)
            for name, module in self.model.named_modules()
            if isinstance(module, torch.nn.ModuleList) and len(module) == LAYERS
        )
        self._owner = self.model.get_submodule(name.rpartition(".")[0])

    def sites(self, token_ids):
        """Site name → [tokens, width] float32, for every site that the family has."""
        log = _Log()
        with ExitStack() as hooks:
            for module in self.model.modules():
                hooks.enter_context(module.register_forward_pre_hook(log.before, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(log.after))
            self._run(token_ids)
        found = {"embed": log.inputs[self.blocks[0]]}
        if norm := self.structure.final_norm:
            found["final_norm"] = log.outputs[self._owner.get_submodule(norm)]
        for layer, layout in enumerate(self.structure.blocks):
            values = _block_sites(self.blocks[layer], layout, log)
            found |= {f"L{layer}_{kind}": rows for kind, rows in values.items()}
        return found

    def hidden_states(self, token_ids):
        """For each block its input, then the output of the last: Transformers' own list."""
        states = self._run(token_ids, output_hidden_states=True).hidden_states
        return [state[0].float().numpy() for state in states]

    def _run(self, token_ids, **options):
        ids = torch.tensor(np.asarray(token_ids))[None].long()
        with torch.no_grad():
            return self.model(ids, use_cache=False, **options)


class _Log:
    """What modules were last given and returned, copied at once: some is overwritten later."""

    def __init__(self):
        self.inputs = {}
        self.outputs = {}

    def before(self, module, args, kwargs):
        self._keep(self.inputs, module, args[0] if args else kwargs.get("hidden_states"))

    def after(self, module, _, output):
        self._keep(self.outputs, module, output[0] if isinstance(output, tuple) else output)

    def _keep(self, kept, module, value):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            kept[module] = value.reshape(-1, value.shape[-1]).float().numpy().copy()


def _block_sites(block, layout, log):
    found = {"resid_pre": log.inputs[block], "resid_post": log.outputs[block]}
    if layout.mid:
        found["resid_mid"] = log.inputs[block.get_submodule(layout.mid)]
    if layout.prelinear:
        found["attn_out_prelinear"] = log.inputs[block.get_submodule(layout.prelinear)]
    for kind, branch in layout.adds.items():
        outputs = [log.outputs[block.get_submodule(name)] for name in branch.modules]
        times = getattr(block, branch.times) if branch.times else 1.0
        found[kind] = sum(outputs) * np.float32(times)
    return found


class RemoteReference(_Rows):
    """Stands for ``Reference(*model)`` in another process."""

    def __init__(self, process, *model):
        self._process, self._model = process, model

    def sites(self, token_ids):
        """As :meth:`Reference.sites`."""
        return self._process.submit(_ask, self._model, "sites", token_ids).result()

    def hidden_states(self, token_ids):
        """As :meth:`Reference.hidden_states`."""
        return self._process.submit(_ask, self._model, "hidden_states", token_ids).result()


_load = cache(Reference)


def _ask(model, method, token_ids):
    return getattr(_load(*model), method)(token_ids)
