"""Passes of vLLM's second model runner that stop early; a program of its own, as ``v2_runner``.

Prints JSON: which blocks, norms and heads ran for which site, sites whose bits differ from whole
passes, and what prompts generate beside captures and alone.
"""

# ruff: noqa: I001, T201 (the environment comes first; the answer is printed)

import v2_environment  # noqa: F401 (before anything of vLLM)

import json
import sys

import numpy as np
from conftest import SPLIT, prompts_of, task_of

from wllm_ray.capture.vllm_capture import VLLMCapture
from wllm_ray.records import ModelIdentity, TokenizerIdentity

SITES = ("embed", "L0_attn_out", "L2_resid_post")
PROMPTS = prompts_of([1, 9, SPLIT + 1], seed=53)


def what_ran(engine):
    """Site → the blocks, norms and heads that ran in its passes, and the features of each."""
    seen = set()
    model = engine._loop.driver._core.model_executor.driver_worker.worker.model_runner.model
    parts = {n: block.self_attn for n, block in enumerate(model.model.layers)}
    parts |= {"norm": model.model.norm, "head": model.logits_processor}
    handles = [
        part.register_forward_pre_hook(lambda *_, name=name: seen.add(name))
        for name, part in parts.items()
    ]
    ran, features = {}, []
    for site in SITES:
        seen.clear()
        features.append(engine.capture(task_of(PROMPTS, sites=[site])).features)
        ran[site] = sorted(seen, key=str)
    for handle in handles:
        handle.remove()
    return ran, features


def generate(engine, beside):
    """The tokens of two prompts, while ``beside`` runs again and again."""
    driver, tokens = engine._loop.driver, {"a": [], "b": []}
    step = driver._core.step

    def note():
        outputs, ran = step()
        for group in outputs.values():
            for one in group.outputs:
                tokens.get(one.request_id[:1], []).extend(one.new_token_ids)
        return outputs, ran

    driver._core.step = note
    started = f"{len(beside)}"
    for name, prompt in zip(tokens, prompts_of([5, 20], seed=54), strict=True):
        ids = prompt.tolist()
        engine._loop.call(
            lambda name=name, ids=ids: driver.add(f"{name}-{started}", ids, max_tokens=4)
        )
    while engine._loop.call(driver._core.scheduler.get_num_unfinished_requests):
        engine.capture(task_of(beside, (0,)))
    driver._core.step = step
    return list(tokens.values())


def main(model):
    with VLLMCapture(
        model,
        model_identity=ModelIdentity(name="tiny", revision="sha256:test"),
        tokenizer_identity=TokenizerIdentity(
            name="tiny", revision="sha256:test", chat_template_sha256=None
        ),
        prefill_split_tokens=SPLIT,
        max_num_seqs=8,
        selftest=False,
    ) as engine:
        ran, cut = what_ran(engine)
        beside = generate(engine, PROMPTS[:2])
        engine._loop.driver.capture.depth_bounded = False
        whole = what_ran(engine)[1]
        alone = generate(engine, PROMPTS[:1])
    pairs = zip(SITES, cut, whole, strict=True)
    told = {
        "ran": ran,
        "differ": [site for site, one, other in pairs if not np.array_equal(one, other)],
        "tokens beside captures": beside,
        "tokens alone": alone,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
