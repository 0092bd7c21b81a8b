"""Every site of an engine, captured in passes that stop early and in whole ones."""

import numpy as np
from conftest import SPLIT, prompts_of, task_of
from tiny_models import LAYERS

from wllm_ray.offered import offered_sites

PROMPTS = prompts_of([1, 9, SPLIT, SPLIT + 1, 2 * SPLIT + 1, 30], seed=51)


def bounded(engine, whether):
    """Let passes stop early or not."""
    capture = engine._loop.driver.capture
    engine._loop.call(lambda: setattr(capture, "depth_bounded", whether))


def every_site_both_ways(engine):
    """Sites whose bits differ between passes that stop and passes that do not."""
    sites = offered_sites(engine.description)
    tasks = [task_of(PROMPTS, sites=[str(one)], position="all_prompt") for one in sites]
    cut = [engine.capture(task).features for task in tasks]
    bounded(engine, whether=False)
    whole = [engine.capture(task).features for task in tasks]
    bounded(engine, whether=True)
    assert len(sites) > 2 * LAYERS
    pairs = zip(sites, cut, whole, strict=True)
    return [str(site) for site, one, other in pairs if not np.array_equal(one, other)]
