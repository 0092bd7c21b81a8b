"""Which matrix kernels run on a CPU, and that the class says what they really do."""

import logging
import sys

import pytest
import torch

from wllm_ray.capture.vllm_kernels import prefer_invariant_kernels

pytestmark = pytest.mark.requirement("D-3", "C-11")

LIMIT = "_CPU_SGL_GEMM_MAX_WEIGHT_BYTES"
MEBIBYTE = 2**20


@pytest.fixture
def kernels(monkeypatch):
    """vLLM's module that chooses them, as it is without us."""
    from vllm.model_executor.layers import utils

    monkeypatch.setattr(utils, LIMIT, MEBIBYTE)
    return utils


def test_large_16_bit_weights_take_the_invariant_kernel_where_there_is_amx(kernels):
    large = (4096, 4096, torch.bfloat16)
    assert not kernels.check_cpu_sgl_kernel(*large)
    prefer_invariant_kernels()
    assert kernels.check_cpu_sgl_kernel(*large) == torch.cpu._is_amx_tile_supported()
    assert not kernels.check_cpu_sgl_kernel(4096, 4096, torch.float32)


def test_without_amx_nothing_changes(kernels, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    prefer_invariant_kernels()
    assert not kernels.check_cpu_sgl_kernel(16, 32, torch.bfloat16)


def test_the_choice_is_made_before_weights_are_packed(kernels, open_engine, monkeypatch):
    limits, pack = [], kernels.dispatch_cpu_unquantized_gemm

    def note(*args, **kwargs):
        limits.append(getattr(kernels, LIMIT))
        return pack(*args, **kwargs)

    monkeypatch.setattr(kernels, "dispatch_cpu_unquantized_gemm", note)
    open_engine("qwen3", dtype="bfloat16").close()
    assert len(limits) >= 4
    assert set(limits) == {sys.maxsize}


def test_a_vllm_without_the_choice_is_told_of_and_left_to_the_selftest(
    kernels, monkeypatch, caplog
):
    monkeypatch.delattr(kernels, LIMIT)
    with caplog.at_level(logging.WARNING):
        prefer_invariant_kernels()
    assert not hasattr(kernels, LIMIT)
    assert "chooses its matrix kernels in a way that is not known here" in caplog.text


def test_kernels_that_depend_on_the_batch_are_found_by_measuring(kernels, open_engine, monkeypatch):
    """Planted: products that differ in the last bits where the number of rows is odd."""
    pack = kernels.dispatch_cpu_unquantized_gemm

    def pack_fickle(layer, *, remove_weight):
        pack(layer, remove_weight=remove_weight)
        right = layer.cpu_linear
        layer.cpu_linear = lambda x, *rest: right(x, *rest) * (1 + 1e-6 * (x.shape[0] % 2))

    monkeypatch.setattr(kernels, "dispatch_cpu_unquantized_gemm", pack_fickle)
    with open_engine("qwen3") as engine:
        told = engine.description
    assert told.fingerprint.reproducibility == "tolerance"
    assert 0.0 < told.selftest.measured_relative_l2 < 1e-4
