"""Every site that an engine offers, at every token, against Transformers; family by family.

One call holds prompts around the length at which vLLM splits them, so that passes hold whole
prompts, pieces of prompts and many prompts at once.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
from conftest import SPLIT, prompts_of, relative_l2
from tiny_models import FAMILIES, HIDDEN, LAYERS, MAX_LEN, VOCAB

from wllm_ray.offered import offered_sites, site_widths
from wllm_ray.records import CaptureTask, TokenRow

CLEARLY_WRONG = 1e-2
LENGTHS = [1, 7, 20, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 1]

# vLLM 0.32.0's rotary kernel for CPUs is wrong for heads that it gets one by one.
_PLAIN_ROTARY = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
_LATENT = {"attention_config": {"backend": "CPU_MLA"}} | _PLAIN_ROTARY


@dataclass(frozen=True)
class Case:
    """How near to Transformers a family comes, and what vLLM needs to run it here.

    Tiny models in float32 differ by the order of additions: 1e-6 to 4e-5 was seen.
    """

    tolerance: float = 1e-4
    vllm_args: dict = field(default_factory=dict)


CASES = {
    "apertus": Case(tolerance=1e-2),  # vLLM keeps xIELU's parameters in bfloat16
    "bloom": Case(tolerance=5e-3),  # vLLM has the exact GELU, Transformers its tanh form
    "deepseek_v2": Case(vllm_args=_LATENT),
    "deepseek_v3": Case(vllm_args=_LATENT),
    "lfm2": Case(vllm_args=_PLAIN_ROTARY),
}
# One of each structure that a capture must tell apart.
QUICK = (
    "llama",
    "gemma3",  # norms after each part
    "gpt2",
    "cohere",  # parts side by side, and a tuple whose second element is stale
    "granite",  # multipliers
    "gpt_neox",  # Transformers' own class, run by vLLM
    "falcon_rw",  # a bias that comes back beside the output
    "opt_350m",  # norms on the stream itself
    "mixtral",
    "granite_hybrid",  # Mamba2 and attention in turns
    "falcon_h1",  # Mamba2 and attention side by side
)
SLOW = [family for family in FAMILIES if family not in QUICK]


@pytest.fixture(
    scope="module",
    params=[*QUICK, *(pytest.param(family, marks=pytest.mark.slow) for family in SLOW)],
)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def case(family):
    return CASES.get(family, Case())


@pytest.fixture(scope="module")
def prompts():
    return prompts_of(LENGTHS)


@pytest.fixture(scope="module")
def expected(family, prompts, reference):
    """Site name → [tokens of all prompts, width]."""
    model = reference(family)
    found = [model.sites(prompt) for prompt in prompts]
    return {name: np.concatenate([one[name] for one in found]) for name in found[0]}


@pytest.fixture(scope="module")
def family_engine(family, case, open_engine):
    with open_engine(family, vllm_args=case.vllm_args) as started:
        yield started


@pytest.fixture(scope="module")
def found(prompts, family_engine):
    """Site name → [tokens of all prompts, width], from one call for everything."""
    sites = offered_sites(family_engine.description)
    rows = tuple(TokenRow(index, prompt) for index, prompt in enumerate(prompts))
    chunk = family_engine.capture(CaptureTask(sites, "all_prompt", rows))
    assert chunk.failures == {}
    assert chunk.row_index.tolist() == list(range(len(prompts)))
    assert chunk.lengths.tolist() == LENGTHS
    assert chunk.widths == site_widths(family_engine.description, sites)
    assert chunk.features.shape == (sum(LENGTHS), sum(chunk.widths))
    assert chunk.features.dtype == np.float32
    assert chunk.features.flags.c_contiguous
    columns = np.split(chunk.features, np.cumsum(chunk.widths)[:-1], axis=1)
    return dict(zip(map(str, sites), columns, strict=True))


@pytest.mark.requirement("C-5", "C-9")
def test_the_sites_offered_are_those_that_the_family_has(expected, found):
    assert set(found) == set(expected)


@pytest.mark.requirement("C-2", "C-4", "C-5", "C-8", "C-9", "C-14")
def test_every_site_holds_the_right_numbers_at_every_token(case, expected, found):
    off = {name: relative_l2(rows, expected[name]).max() for name, rows in found.items()}
    assert max(off.values()) <= case.tolerance, sorted(off.items(), key=lambda one: -one[1])[:5]


@pytest.mark.requirement("C-14")
def test_the_neighbouring_layer_and_the_neighbouring_token_are_clearly_others(expected, found):
    for name, rows in found.items():
        layer, _, kind = name.partition("_")
        neighbour = f"L{int(layer[1:]) - 1}_{kind}" if layer[1:].isdigit() else None
        if neighbour in expected and expected[neighbour].shape == rows.shape:
            assert relative_l2(rows, expected[neighbour]).min() > CLEARLY_WRONG, name
        shifted = relative_l2(rows, np.roll(expected[name], 1, axis=0))
        assert np.median(shifted) > CLEARLY_WRONG, name
