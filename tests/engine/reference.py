"""Transformers' own block outputs: one prompt at a time, no padding, hooks on the blocks.

``hidden_states[-1]`` has passed the final norm, so the blocks themselves are hooked.
"""

import numpy as np
import torch
from transformers import AutoModelForCausalLM


class Reference:
    def __init__(self, path, dtype):
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
        layers = self.model.config.num_hidden_layers
        lists = [m for m in self.model.modules() if isinstance(m, torch.nn.ModuleList)]
        (self.blocks,) = [blocks for blocks in lists if len(blocks) == layers]

    def rows_at(self, token_ids, positions):
        """[positions, layers, hidden] float32: each block's output there."""
        rows = []

        def keep(_, __, output):
            hidden = output[0] if isinstance(output, tuple) else output
            rows.append(hidden[0, positions].float().numpy().copy())

        handles = [block.register_forward_hook(keep) for block in self.blocks]
        try:
            with torch.no_grad():
                self.model(torch.tensor(np.asarray(token_ids))[None].long(), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return np.stack(rows, axis=1)

    def all_rows(self, prompts):
        """[prompts, layers, hidden]: each block's output at the last token."""
        return np.concatenate([self.rows_at(prompt, [-1]) for prompt in prompts])
