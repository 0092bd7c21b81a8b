"""What a self-test needs of an engine, and what it establishes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wllm_ray.capture.anatomy import Anatomy
from wllm_ray.capture.coverage import ChunkCapture, RowsWanted
from wllm_ray.capture.reading import Reading
from wllm_ray.capture.request import support_of
from wllm_ray.errors import CaptureError
from wllm_ray.records import EngineDescription, ModelIdentity, SelfTestReport, TokenizerIdentity
from wllm_ray.sites import HookSite

__all__ = [
    "NOT_TESTED",
    "SEED",
    "Floats",
    "Names",
    "Proof",
    "Sites",
    "Subject",
    "failed",
    "features_of",
    "probe_prompts",
    "proven",
    "two_positions",
]

Floats = NDArray[np.float32]
Sites = tuple[HookSite, ...]

SEED = 20261129

NOT_TESTED = SelfTestReport(
    passed=False,
    checks={"skipped": "the self-test was turned off"},
    reproducibility="tolerance",
    measured_relative_l2=0.0,
    prompt_lengths=(),
    residual="not tested",
    seconds=0.0,
)


@dataclass(frozen=True, slots=True)
class Names:
    """Who the model is, for clients and fingerprints."""

    served: str
    model: ModelIdentity
    tokenizer: TokenizerIdentity


@dataclass(frozen=True, slots=True)
class Subject:
    """What the self-test needs of an engine.

    Attributes:
        capture: Runs rows together and returns their chunk: (rows, sites, number of logprobs).
        log_probabilities: [N, vocab] from [N, hidden] rows of the last block, through the model's
            own final norm and head; None for a model without a head.
        set_depth_bounded: Lets passes stop at the deepest block wanted, or not; not at first.
        readings: Every site that can be read.
        description: The engine's sizes and dtype.
        split_tokens: The multiple at which prompts are split.
        residual: How the stream is read, in words.
        may_be_bitwise: The set-up allows equality to the bit: one thread or batch-invariant mode,
            and no state that layers carry from pass to pass.
        bounds_depth: Whether passes are to stop early.
        reads_cache: Whether rows of which only the last token is read may begin in cached blocks.
    """

    capture: Callable[[list[RowsWanted], Sites, int | None], ChunkCapture]
    log_probabilities: Callable[[Floats], Floats] | None
    set_depth_bounded: Callable[[bool], None]
    readings: Mapping[HookSite, Reading]
    description: EngineDescription
    split_tokens: int
    residual: str
    may_be_bitwise: bool
    bounds_depth: bool
    reads_cache: bool = False

    @property
    def num_layers(self) -> int:
        """Decoder blocks."""
        return self.description.num_layers

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt."""
        return self.description.max_model_len

    @property
    def dtype(self) -> str:
        """The model's, as ``float32``."""
        return self.description.fingerprint.engine_dtype

    def stream(self, layers: Sequence[int]) -> Sites:
        """``resid_post`` of these blocks."""
        return tuple(HookSite(layer, "resid_post") for layer in layers)


@dataclass(frozen=True, slots=True)
class Proof:
    """What the self-test established.

    Attributes:
        report: For every manifest.
        refused: Sites whose identity does not hold; they are not offered.
        depth_bounded: Whether passes stop at the deepest block wanted from now on.
    """

    report: SelfTestReport
    refused: frozenset[HookSite]
    depth_bounded: bool


def proven(
    proof: Proof, anatomy: Anatomy, description: EngineDescription
) -> tuple[Anatomy, EngineDescription]:
    """What is left to read, and what an engine may say of itself: what was proven, no more."""
    left = anatomy.without(proof.refused)
    fingerprint = description.fingerprint.model_copy(
        update={"reproducibility": proof.report.reproducibility}
    )
    told = description.model_copy(
        update={
            "sites": support_of(left.readings),
            "depth_bounded": proof.depth_bounded,
            "fingerprint": fingerprint,
            "selftest": proof.report,
        }
    )
    return left, told


def features_of(chunk: ChunkCapture) -> list[Floats]:
    """[positions, sum(widths)] of each row, all proven whole."""
    for row in chunk.rows:
        if row.failure is not None:
            raise failed(
                f"a probe prompt of {len(row.wanted.token_ids)} tokens was not captured "
                f"({row.failure.code}): {row.failure.message}"
            )
    return [chunk.features[row.slots] for row in chunk.rows]


def failed(message: str) -> CaptureError:
    """The error of a check that found something wrong."""
    return CaptureError(f"self-test: {message}", code="self_test_failed")


def probe_prompts(subject: Subject, lengths: Sequence[int]) -> list[NDArray[np.int32]]:
    """Random prompts of these lengths, the same at every start.

    Special tokens stand at either end of a vocabulary; they are left out where there is room.
    """
    random = np.random.default_rng(SEED)
    vocabulary = subject.description.vocab_size
    low, high = vocabulary // 16, vocabulary - vocabulary // 16
    return [random.integers(low, max(high, low + 1), n, dtype=np.int32) for n in lengths]


def two_positions(index: int, prompt: NDArray[np.int32]) -> RowsWanted:
    """The middle and the last position: two places that a wrong offset would not both hit."""
    positions = np.unique([len(prompt) // 2, len(prompt) - 1]).astype(np.int64)
    return RowsWanted(index, prompt, positions)
