"""What is captured is owned: fused norms that write into their arguments change nothing.

On a GPU vLLM's norms write the sum into the residual and the normed sum into the branch. Here they
are made to do so on the CPU.
"""

import numpy as np
import pytest
from conftest import SPLIT, prompts_of, task_of

from wllm_ray.capture import hooks
from wllm_ray.capture.reading import follow
from wllm_ray.offered import offered_sites

pytestmark = pytest.mark.requirement("C-4")

PROMPTS = prompts_of([9, SPLIT, 1, 2 * SPLIT + 1], seed=61)


@pytest.fixture
def in_place(monkeypatch):
    """vLLM's norms as CUDA has them; returns how often one wrote into its arguments."""
    from vllm.model_executor.layers import layernorm

    wrote = []
    for norm in (layernorm.RMSNorm, layernorm.GemmaRMSNorm):
        plain = norm.forward_native

        def fused(self, x, residual=None, plain=plain):
            if residual is None:
                return plain(self, x)
            normed, total = plain(self, x.clone(), residual.clone())
            wrote.append(1)
            residual.copy_(total)
            return x.copy_(normed), residual

        monkeypatch.setattr(norm, "forward_native", fused)
    return wrote


def every_site(engine, prompts=PROMPTS):
    """Site → [feature rows, width]; all in one chunk, so that the passes go to the end."""
    sites = [str(site) for site in offered_sites(engine.description)]
    chunk = engine.capture(task_of(prompts, sites=sites, position="all_prompt"))
    edges = np.cumsum([0, *chunk.widths])[:-1]
    return dict(zip(sites, np.split(chunk.features, edges[1:], axis=1), strict=True))


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_every_site_is_what_it_is_without_fused_norms(family, open_engine, in_place, monkeypatch):
    with open_engine(family) as engine:
        fused = every_site(engine)
    assert len(in_place) > 100
    monkeypatch.undo()
    with open_engine(family, selftest=False) as engine:
        plain = every_site(engine)
    assert fused.keys() == plain.keys()
    assert [site for site in plain if not np.array_equal(fused[site], plain[site])] == []


def test_without_the_copy_this_is_noticed(open_engine, in_place, monkeypatch):
    """The control: rows that are views of what the modules returned."""

    def view(value, path, rows):
        tensor = follow(value, path)
        return tensor.reshape(-1, tensor.shape[-1])[int(rows[0]) : int(rows[-1]) + 1]

    with open_engine("qwen3", selftest=False) as engine:
        owned = every_site(engine, PROMPTS[:1])
        monkeypatch.setattr(hooks, "take", view)
        seen = every_site(engine, PROMPTS[:1])
    assert len(in_place) > 0
    changed = {site for site in owned if not np.array_equal(owned[site], seen[site])}
    assert {"embed", "L0_resid_pre", "L0_attn_out", "L3_attn_out", "L2_mlp_out"} <= changed
