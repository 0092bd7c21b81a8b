"""What a vLLM engine says of itself, and the self-test that establishes it."""

from __future__ import annotations

from collections.abc import Callable

from wllm_ray.capture.anatomy import Anatomy
from wllm_ray.capture.coverage import ChunkCapture, RowsWanted
from wllm_ray.capture.engine_loop import EngineLoop
from wllm_ray.capture.facts import (
    batch_invariant,
    device_name,
    dtype_name,
    library_versions,
    vllm_version,
)
from wllm_ray.capture.proof import NOT_TESTED, Names, Sites, Subject, proven
from wllm_ray.capture.request import POSITIONS, support_of
from wllm_ray.capture.selftest import run_selftest
from wllm_ray.capture.vllm_config import EngineOptions
from wllm_ray.capture.vllm_driver import VLLMDriver
from wllm_ray.records import EngineDescription, Fingerprint

__all__ = ["describe", "prove"]


def describe(driver: VLLMDriver, options: EngineOptions, names: Names) -> EngineDescription:
    """What is known before the self-test; :func:`prove` fills in what it finds."""
    facts, anatomy = driver.facts, driver.anatomy
    fingerprint = Fingerprint(
        model_revision=names.model.revision,
        tokenizer_revision=names.tokenizer.revision,
        engine="vllm",
        engine_version=vllm_version(),
        engine_dtype=dtype_name(facts.dtype),
        precision=options.precision,
        device=device_name(facts.device),
        threads=driver.threads,
        prefill_split_tokens=driver.limits.split_tokens,
        reproducibility="tolerance",
    )
    return EngineDescription(
        served_model_name=names.served,
        model=names.model,
        tokenizer=names.tokenizer,
        architecture=facts.architecture,
        num_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        max_model_len=driver.max_model_len,
        layer_types=anatomy.block_types,
        sites=support_of(anatomy.readings),
        positions=POSITIONS,
        depth_bounded=options.depth_bounded,
        fingerprint=fingerprint,
        versions=library_versions(vllm_version()),
        selftest=NOT_TESTED,
    )


def prove(
    loop: EngineLoop,
    options: EngineOptions,
    description: EngineDescription,
    capture: Callable[[list[RowsWanted], Sites, int | None], ChunkCapture],
) -> tuple[Anatomy, EngineDescription]:
    """Run the self-test; what it proved, and nothing else.

    Args:
        loop: The engine.
        options: How it was built.
        description: What is known of it.
        capture: Runs rows together: (rows, sites, number of log-probabilities).

    Raises:
        CaptureError: A check failed (code ``self_test_failed``).
    """
    driver = loop.driver
    # A recurrent state is rounded by where its passes begin, a prefix found in the cache leaves a
    # short tail to compute; in 16 bits a few probe prompts can all hide that.
    invariant = driver.threads == 1 or batch_invariant()
    steady = not driver.facts.recurrent and not options.prefix_caching

    def set_bounded(bounded: bool) -> None:  # noqa: FBT001 (a switch)
        loop.call(lambda: setattr(driver.capture, "depth_bounded", bounded))

    proof = run_selftest(
        Subject(
            capture=capture,
            log_probabilities=lambda rows: loop.call(lambda: driver.log_probabilities(rows)),
            set_depth_bounded=set_bounded,
            readings=driver.anatomy.readings,
            description=description,
            split_tokens=driver.limits.split_tokens,
            residual=driver.topology.describe(),
            may_be_bitwise=invariant and steady,
            bounds_depth=options.depth_bounded,
            reads_cache=options.prefix_caching,
        )
    )
    return proven(proof, driver.anatomy, description)
