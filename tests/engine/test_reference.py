"""The reference itself: its sites add up, and are what Transformers calls hidden states.

No vLLM here. Were a layout wrong, test_every_site.py would blame the engine.
"""

import numpy as np
import pytest
from conftest import EACH_FAMILY, prompts_of, relative_l2
from layouts import STRUCTURES
from tiny_models import FAMILIES, LAYERS

pytestmark = pytest.mark.requirement("C-5", "C-14")

# float32, added in another order.
ROUNDING = 1e-6


@pytest.fixture(scope="module", params=EACH_FAMILY)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model(family, reference):
    return reference(family)


@pytest.fixture(scope="module")
def prompt():
    return prompts_of([50])[0]


@pytest.fixture(scope="module")
def sites(model, prompt):
    return model.sites(prompt)


def test_every_family_has_a_structure():
    assert set(FAMILIES) <= set(STRUCTURES)


def test_branches_add_up_to_the_stream(family, sites):
    for layer, layout in enumerate(STRUCTURES[family].blocks):
        block = {kind: sites[f"L{layer}_{kind}"] for kind in layout.kinds}
        # `moe_out` and, on Mamba blocks, `mixer_out` are second names.
        second = {"moe_out", *(["mixer_out"] if "mamba_out" in block else [])}
        mixers = sum(block[kind] for kind in layout.adds if kind not in {"mlp_out", *second})
        if layout.mid:
            assert near(block["resid_pre"] + mixers, block["resid_mid"])
        if "mlp_out" in block:
            start = block["resid_mid"] if layout.mid else block["resid_pre"] + mixers
            assert near(start + block["mlp_out"], block["resid_post"])
        elif not layout.mid:
            assert near(block["resid_pre"] + mixers, block["resid_post"])
        assert "moe_out" not in block or np.array_equal(block["moe_out"], block["mlp_out"])


def test_a_block_begins_with_what_the_one_before_left(sites):
    assert np.array_equal(sites["embed"], sites["L0_resid_pre"])
    for layer in range(1, LAYERS):
        assert np.array_equal(sites[f"L{layer}_resid_pre"], sites[f"L{layer - 1}_resid_post"])


def test_the_stream_is_what_transformers_calls_hidden_states(family, model, prompt, sites):
    *states, last = model.hidden_states(prompt)
    # Mamba2's list begins after the first block, and holds the last block's output too.
    kind = "resid_post" if family == "mamba2" else "resid_pre"
    for layer, state in enumerate(states):
        assert np.array_equal(sites[f"L{layer}_{kind}"], state)
    # OPT-350m's last entry has been projected to another width.
    assert family == "opt_350m" or np.array_equal(sites["final_norm"], last)


def near(found, expected):
    return relative_l2(found, expected).max() <= ROUNDING
