"""The toy: the real extractor on a stand-in model, run as people run it."""

import re
import subprocess
import sys

import pytest

# Imported before the toy runs, these would mean that it is no stand-in for a bare machine.
_REPORT_IMPORTS = """
import runpy, sys
try:
    runpy.run_module("wllm_ray.capture.toy", run_name="__main__")
except SystemExit as end:
    print("exit", end.code, [m for m in ("vllm", "transformers", "ray") if m in sys.modules])
"""


@pytest.fixture(scope="module")
def printed():
    """What ``python -m wllm_ray.capture.toy`` prints."""
    command = [sys.executable, "-m", "wllm_ray.capture.toy"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.requirement("C-9", "C-13")
def test_every_site_of_the_three_blocks_is_captured_with_its_width(printed):
    assert "3 blocks (mamba; moe; attention + mlp)" in printed
    assert "3 rows of 5, 19, 12 tokens, 0 failed" in printed
    table = dict(
        re.findall(r"^(L\d_\w+|embed|final_norm) +(\d+) +\d+\.\d+$", printed, re.MULTILINE)
    )
    expected = {"embed", "final_norm"}
    expected |= {f"L0_{kind}" for kind in ("resid_pre", "mamba_out", "mixer_out", "resid_post")}
    expected |= {f"L1_{kind}" for kind in ("resid_pre", "mlp_out", "moe_out", "resid_post")}
    expected |= {f"L2_{kind}" for kind in ("resid_pre", "attn_out", "attn_out_prelinear")}
    expected |= {f"L2_{kind}" for kind in ("resid_mid", "mlp_out", "resid_post")}
    assert set(table) == expected
    widths = {name: int(width) for name, width in table.items()}
    assert widths.pop("L2_attn_out_prelinear") == 96
    assert set(widths.values()) == {64}


@pytest.mark.requirement("C-5")
def test_the_identities_hold_and_are_shown(printed):
    shown = re.findall(r"^(L.+ = L.+): holds, relative L2 (\S+)$", printed, re.MULTILINE)
    assert [identity for identity, _ in shown] == [
        "L0_resid_pre + L0_mamba_out = L0_resid_post",
        "L1_resid_pre + L1_mlp_out = L1_resid_post",
        "L2_resid_pre + L2_attn_out = L2_resid_mid",
        "L2_resid_mid + L2_mlp_out = L2_resid_post",
    ]
    assert all(float(off) < 1e-6 for _, off in shown)
    assert "identities: 4 of 4 hold" in printed


@pytest.mark.requirement("S-2")
def test_it_needs_neither_vllm_nor_transformers_nor_ray():
    done = subprocess.run(
        [sys.executable, "-c", _REPORT_IMPORTS],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.endswith("exit 0 []\n")
