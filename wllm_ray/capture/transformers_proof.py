"""What a Transformers engine says of itself, and the self-test that establishes it."""

from __future__ import annotations

import torch

from wllm_ray.capture.anatomy import Anatomy
from wllm_ray.capture.coverage import ChunkCapture, RowsWanted, SitesWanted
from wllm_ray.capture.facts import device_name, dtype_name, library_versions
from wllm_ray.capture.precision import Precision
from wllm_ray.capture.proof import NOT_TESTED, Names, Subject, proven
from wllm_ray.capture.request import POSITIONS, support_of
from wllm_ray.capture.selftest import run_selftest
from wllm_ray.capture.transformers_driver import TransformersDriver
from wllm_ray.capture.transformers_model import LoadedModel
from wllm_ray.records import EngineDescription, Fingerprint
from wllm_ray.sites import HookSite

__all__ = ["describe", "prove"]


def describe(
    loaded: LoadedModel,
    anatomy: Anatomy,
    names: Names,
    *,
    precision: Precision,
    depth_bounded: bool,
) -> EngineDescription:
    """What is known before the self-test; :func:`prove` fills in what it finds.

    ``prefill_split_tokens`` is 0: a row is never split. Threads are those of the calling thread.
    """
    on_cpu = loaded.device.type == "cpu"
    fingerprint = Fingerprint(
        model_revision=names.model.revision,
        tokenizer_revision=names.tokenizer.revision,
        engine="transformers",
        engine_version=loaded.library,
        engine_dtype=dtype_name(loaded.dtype),
        precision=precision,
        device=device_name(loaded.device),
        threads=torch.get_num_threads() if on_cpu else None,
        prefill_split_tokens=0,
        reproducibility="tolerance",
    )
    return EngineDescription(
        served_model_name=names.served,
        model=names.model,
        tokenizer=names.tokenizer,
        architecture=loaded.architecture,
        num_layers=loaded.num_layers,
        hidden_size=loaded.hidden_size,
        vocab_size=loaded.vocab_size,
        max_model_len=loaded.max_model_len,
        layer_types=anatomy.block_types,
        sites=support_of(anatomy.readings),
        positions=POSITIONS,
        depth_bounded=depth_bounded,
        fingerprint=fingerprint,
        versions=library_versions(),
        selftest=NOT_TESTED,
    )


def prove(
    driver: TransformersDriver, description: EngineDescription, *, one_row_a_pass: bool
) -> EngineDescription:
    """Run the self-test; leaves the driver with what it proved, and returns what it established.

    Bits are promised where a row's pass depends on that row alone: one row in each, on one CPU
    thread. In a batch, matrix kernels add up in an order that depends on its size.

    Args:
        driver: The model.
        description: What is known of it.
        one_row_a_pass: Whether rows never share a pass.

    Raises:
        CaptureError: A check failed (``self_test_failed``).
    """
    readings = driver.anatomy.readings

    def capture(
        rows: list[RowsWanted], sites: tuple[HookSite, ...], num_logprobs: int | None
    ) -> ChunkCapture:
        widths = tuple(readings[site].width for site in sites)
        wanted = SitesWanted(sites, widths, depth=max(readings[site].depth for site in sites))
        ids = [f"probe-{number}" for number in range(len(rows))]
        chunk = ChunkCapture(wanted, rows, ids, num_logprobs)
        driver.run(chunk, lambda: None)
        chunk.prove()
        return chunk

    proof = run_selftest(
        Subject(
            capture=capture,
            log_probabilities=driver.log_probabilities if driver.has_head else None,
            set_depth_bounded=lambda bounded: setattr(driver, "depth_bounded", bounded),
            readings=readings,
            description=description,
            split_tokens=description.max_model_len,
            residual=driver.topology.describe(),
            may_be_bitwise=one_row_a_pass and description.fingerprint.threads == 1,
            bounds_depth=description.depth_bounded,
        )
    )
    driver.anatomy, told = proven(proof, driver.anatomy, description)
    return told
