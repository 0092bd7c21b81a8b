"""A scheduler that does whatever a seed tells it to, in front of router, hooks, buffers and depth.

The model is :mod:`toy_models`, its readings are found as an engine finds them, and what each row
should be is worked out by hooks of this module's own.
"""

import random
from dataclasses import dataclass, field

import numpy as np
import torch
from toy_models import HIDDEN, LAYERS, VOCAB, Decoder, contexts_of

from wllm_ray.capture.anatomy import dissect
from wllm_ray.capture.block_lists import find_block_lists
from wllm_ray.capture.coverage import ChunkCapture, RowsWanted, SitesWanted
from wllm_ray.capture.depth import DepthBound
from wllm_ray.capture.hooks import SiteHooks
from wllm_ray.capture.passes import PassCapture
from wllm_ray.capture.probe import Probe
from wllm_ray.capture.router import Pass
from wllm_ray.capture.staging import HostStager
from wllm_ray.capture.topology import settle
from wllm_ray.positions import is_reduced, resolve

POSITIONS = ("last_prompt", "first", "all_prompt", "mean_prompt", "index:-1,0", "index:0,2,-2")


def _read(model):
    """Site → reading, found as an engine finds them."""
    tokens = torch.arange(8)
    lists = find_block_lists(model, LAYERS)
    with torch.inference_mode(), Probe(model, lists, HIDDEN, len(tokens)) as probe:
        model(tokens, contexts_of(tokens))
    with torch.inference_mode():
        topology = settle(probe.log, lists, dict(model.named_modules()))
        return dissect(probe.log, topology).readings


MODEL = Decoder()
READINGS = _read(Decoder())
ALL_SITES = tuple(READINGS)


class _Copies:
    """Hooks of the test's own: what each module returned, copied at once."""

    def __init__(self):
        self.model = Decoder()
        self.seen = {}
        for name, module in self.model.named_modules():
            module.register_forward_pre_hook(lambda _, args, name=name: self._keep(name, args))
            module.register_forward_hook(lambda _, __, out, name=name: self._keep(f"{name}>", out))

    def _keep(self, name, value):
        values = value if isinstance(value, tuple) else (value,)
        self.seen[name] = [one.clone() if one is not None else None for one in values]

    def sites(self, prompt):
        """Site → [N, width] of a prompt alone, worked out here and not by the code under test."""
        with torch.inference_mode():
            out = self.model(torch.from_numpy(prompt).long(), contexts_of(prompt))
        found = {"embed": self.seen["embed>"][0], "final_norm": out}
        for layer in range(LAYERS):
            name = f"layers.{layer}"
            branch, residual = self.seen[f"{name}>"]
            before = found["embed"] if layer == 0 else found[f"L{layer - 1}_resid_post"]
            found |= {
                f"L{layer}_resid_pre": before,
                f"L{layer}_attn_out": self.seen[f"{name}.self_attn>"][0],
                f"L{layer}_attn_out_prelinear": self.seen[f"{name}.self_attn.o_proj"][0],
                f"L{layer}_resid_mid": before + self.seen[f"{name}.self_attn>"][0],
                f"L{layer}_mlp_out": branch,
                f"L{layer}_resid_post": branch + residual,
            }
        return {site: values.numpy() for site, values in found.items()}


ALONE = _Copies()


@dataclass
class _Request:
    """One request of the simulated scheduler."""

    id: str
    prompt: np.ndarray
    decodes: int
    done: int = 0
    reached: int = 0
    tainted: bool = False

    @property
    def finished(self):
        return self.done >= len(self.prompt) + self.decodes


@dataclass
class _Chunk:
    position: str
    capture: ChunkCapture
    requests: list = field(default_factory=list)
    aborted: bool = False


class History:
    """A scheduler that does whatever a seed tells it to, in front of the real code."""

    def __init__(self, seed, passes=25):
        self.random = random.Random(seed)
        self.capture = PassCapture(SiteHooks(READINGS_OF_MODEL, HostStager()), DEPTHS)
        self.capture.depth_bounded = self.random.random() < 0.7
        self.numbers = iter(range(10**6))
        self.chunks, self.live, self.cut = [], [], 0
        for _ in range(self.random.randint(1, passes)):
            self.step()

    def step(self):
        if self.random.random() < 0.5 and len(self.chunks) < 5:
            self.submit()
        if self.random.random() < 0.3:
            self.foreign()
        if self.random.random() < 0.08:
            self.abort()
        self.run_pass()

    def prompt(self):
        length = self.random.choice([1, 1, 2, 5, 9, 20])
        return np.array([self.random.randrange(VOCAB) for _ in range(length)], dtype=np.int32)

    def submit(self):
        """A chunk with some sites and one position; rows that have not such a position stay out."""
        sites = tuple(self.random.sample(ALL_SITES, self.random.randint(1, 6)))
        position = self.random.choice(POSITIONS)
        rows, ids = [], []
        for index in range(self.random.randint(1, 4)):
            prompt = self.prompt()
            if position == "index:0,2,-2" and len(prompt) < 3:
                continue
            asked = resolve(position, len(prompt))
            ascending, order = np.unique(asked, return_inverse=True)
            as_is = np.array_equal(asked, ascending)
            rows.append(RowsWanted(index, prompt, ascending, None if as_is else order))
            ids.append(f"r{next(self.numbers)}")
        depth = max(READINGS[site].depth for site in sites)
        widths = tuple(READINGS[site].width for site in sites)
        wanted = SitesWanted(sites, widths, depth, mean=is_reduced(position))
        chunk = _Chunk(position, ChunkCapture(wanted, rows, ids))
        for row in chunk.capture.rows:
            decodes = self.random.choice([0, 0, 0, 3])
            self.capture.reserve(row)
            # Who generates needs the whole model, and says so by saying nothing.
            if not decodes:
                self.capture.expect(row.request_id, depth)
            chunk.requests.append(_Request(row.request_id, row.wanted.token_ids, decodes))
        self.live += chunk.requests
        self.chunks.append(chunk)

    def foreign(self):
        """A request that nobody reads; some are fillers, which need no block at all."""
        one = _Request(f"f{next(self.numbers)}", self.prompt(), self.random.choice([0, 4]))
        if not one.decodes:
            self.capture.expect(one.id, -1)
        self.live.append(one)

    def abort(self):
        if self.chunks:
            chunk = self.random.choice(self.chunks)
            chunk.aborted = True
            for request in chunk.requests:
                self.capture.release(request.id)
                self.live = [one for one in self.live if one is not request]

    def run_pass(self):
        """Some requests in any order: prefill chunks, decodes, restarts, at times a wrong id."""
        chosen = [one for one in self.live if self.random.random() < 0.75]
        self.random.shuffle(chosen)
        if not chosen:
            return
        spans, ids, contexts = [], [], []
        for one in chosen:
            if one.done and self.random.random() < 0.15:
                one.done = 0
            whole = np.concatenate([one.prompt, np.full(one.decodes, 7, np.int32)])
            left = max(1, len(one.prompt) - one.done)
            count = self.random.choice([left, self.random.randint(1, left)])
            run = whole[one.done : one.done + count].copy()
            if self.random.random() < 0.02 and one.done < len(one.prompt):
                run[0] = (run[0] + 1) % VOCAB
                one.tainted = True
            spans.append((one.done, count))
            ids.append(run)
            contexts.append(contexts_of(whole)[one.done : one.done + count])
            one.done += count
            one.reached = max(one.reached, one.done)
        starts, counts = (np.array(values, dtype=np.int64) for values in zip(*spans, strict=True))
        flat = np.concatenate(ids).astype(np.int64)
        self.capture.begin(
            Pass(
                request_ids=tuple(one.id for one in chosen),
                query_start_loc=np.concatenate([[0], np.cumsum(counts)]),
                num_computed=starts,
                num_scheduled=counts,
                token_ids=flat,
            )
        )
        with torch.inference_mode():
            MODEL(torch.from_numpy(flat), torch.cat(contexts))
        self.cut += self.capture.headless
        self.capture.end()
        for one in chosen:
            if one.finished:
                self.capture.release(one.id)
                self.live.remove(one)


DEPTHS = DepthBound(MODEL, tuple(MODEL.layers))
READINGS_OF_MODEL = _read(MODEL)


def expected_of(prompt, sites, position):
    """[feature rows, sum(widths)] of a prompt alone."""
    alone = ALONE.sites(prompt)
    rows = np.concatenate([alone[str(site)] for site in sites], axis=1)
    rows = rows[resolve(position, len(prompt))]
    if not is_reduced(position):
        return rows
    total = np.zeros(rows.shape[1], dtype=np.float32)
    for row in rows:
        total += row
    return (total / np.float32(len(rows)))[None]


def check(history):
    """Every row is right or has failed, and fails only where the history gives a reason."""
    for chunk in history.chunks:
        if chunk.aborted:
            continue
        chunk.capture.prove()
        expected = []
        for row, request in zip(chunk.capture.rows, chunk.requests, strict=True):
            code = row.failure and row.failure.code
            if request.tainted:
                assert code == "token_mismatch"
            elif request.reached <= row.wanted.positions[-1]:
                assert code == "position_missing"
            else:
                assert code is None, row.failure
                found = expected_of(row.wanted.token_ids, chunk.capture.sites, chunk.position)
                expected.append(found)
        found = chunk.capture.good_rows()
        assert len(found) == sum(map(len, expected))
        if expected:
            assert np.array_equal(found, np.concatenate(expected))


def check_many(seeds):
    for seed in seeds:
        check(History(seed))
