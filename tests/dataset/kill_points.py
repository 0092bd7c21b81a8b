"""Kill a writer at each point that matters, then look and resume. Run by test_crash.py.

``kill_points.py KIND ROOT [URL]``: under the local ROOT before each system call and in the middle
of each write; with the URL of a :class:`killing_proxy.KillingProxy`, under the object store ROOT
after each request that changes something. ``KIND`` is one of :data:`KINDS`; ``committers`` kills
one of two committers of a dataset that both find staged.

The process forks for each point and never writes itself where it matters, so that every child
starts from the same state. Prints one JSON object per point.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import sys
import tempfile
import urllib.request
from pathlib import Path

from dataset_builders import FAILED_ROW, capture, make_rows, make_spec, rows_of, stage_all

from wllm_ray.dataset.format.manifest import TraceSpec
from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.reading.verify import verify_dataset
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.dataset.writing.writer import commit_manifest, create_spec, stage_shard, staged_shards
from wllm_ray.errors import NotFoundError

ROWS = make_rows(5, failed=[FAILED_ROW])
PER_SITE = {
    "position": "all_prompt",
    "sites": ("embed", "L1_attn_out_prelinear"),
    "site_widths": (4, 6),
}
TRACE = TraceSpec(
    sites=("embed", "L1_attn_out_prelinear", "L2_mlp_out"),
    site_widths=(4, 6, 3),
)
# Two vectors of a row are more than an object store takes in one part.
LARGE = {"site_widths": (1 << 20,)}
KINDS = {
    "stacked": {},
    "per_site": PER_SITE,
    "arrow": PER_SITE | {"shard_format": "arrow"},
    "traces": PER_SITE | {"trace": TRACE},
    "large": LARGE,
    "committers": {},
}
_answer = os.write  # the answer to the parent is not one of the points
# More than a commit makes. Where the other one is faster it makes none, at any point.
COMMIT_CALLS = 10
CALLS = ("mkdir", "write", "fsync", "link", "replace", "unlink")


def write(root, asked):
    """The job: what a resubmission runs, too."""
    store = open_store(root)
    spec = make_spec(ROWS, **asked)
    create_spec(store, spec)
    done = staged_shards(store, spec)
    for shard in range(len(spec.shards)):
        if shard not in done:
            part = rows_of(spec, ROWS, shard)
            stage_shard(store, spec, shard, part, [capture(part, spec)])
    return commit_manifest(store, "d"), len(done)


def look(root, asked):
    """What a reader finds after the crash, and what a resubmission makes of it."""
    try:
        found = len(load_dataset(root, "d", verify="full"))
    except NotFoundError:
        found = None
    manifest, resumed = write(root, asked)
    return {
        "found": found,
        "resumed": resumed,
        "content": manifest.content_sha256,
        "rows": load_dataset(root, "d").row_ids,
        "faults": [str(fault) for fault in verify_dataset(root, "d").faults],
        "temporary": sum(1 for _ in Path(root).rglob(".tmp-*")),
    }


# --- processes ------------------------------------------------------------------------------------


def begin(work):
    """Run ``work`` in a child; returns what waits for its result: None where it was killed."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        data = json.dumps(work()).encode()
        _answer(send, data)
        os._exit(0)
    os.close(send)

    def end():
        with os.fdopen(receive, "rb") as pipe:
            data = pipe.read()
        os.waitpid(child, 0)
        return json.loads(data) if data else None

    return end


def in_child(work):
    """Run ``work`` in a child; its result, or None where it was killed."""
    return begin(work)()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(point):
    """Make the ``point``-th of the calls end this process as the kernel would."""
    calls = itertools.count(1)

    def mortal(real):
        def call(*args, **options):
            if next(calls) == point:
                if real.__name__ == "write":
                    descriptor, data = args
                    real(descriptor, data[: len(data) // 2])
                die()
            return real(*args, **options)

        return call

    for name in CALLS:
        setattr(os, name, mortal(getattr(os, name)))


def doomed(point, work):
    """``work`` up to the ``point``-th call; whether that was its end."""
    die_at(point)
    work()
    return True


# --- what is killed -------------------------------------------------------------------------------


def killed_locally(root, asked, point):
    return in_child(lambda: doomed(point, lambda: write(root, asked)))


def killed_by_the_proxy(root, asked, point, url):
    def work():
        urllib.request.urlopen(f"{url}/die/{os.getpid()}/{point}").close()
        write(root, asked)
        return True

    return in_child(work)


def one_of_two_committers_killed(root, asked, point):
    """Whether the one survived; the other must have committed whatever happened to it."""
    in_child(lambda: stage_all(open_store(root), make_spec(ROWS, **asked), ROWS))
    killed = begin(lambda: doomed(point, lambda: commit_manifest(open_store(root), "d")))
    other = begin(lambda: commit_manifest(open_store(root), "d").content_sha256)
    survived = killed()
    content = other()
    manifest, _ = write(root, asked)
    assert content == manifest.content_sha256
    return survived


def main():
    kind, root, *url = sys.argv[1:]
    asked = KINDS[kind]
    kill = one_of_two_committers_killed if kind == "committers" else killed_locally
    if url:
        kill = functools.partial(killed_by_the_proxy, url=url[0])
    with tempfile.TemporaryDirectory() as elsewhere:
        write(elsewhere, asked)  # what is imported late is imported once
    for point in range(1, 1000):
        here = f"{root}/{point}"
        survived = kill(here, asked, point)
        after = in_child(functools.partial(look, here, asked))
        sys.stdout.write(json.dumps({"point": point, "survived": survived} | after) + "\n")
        if survived and (kind != "committers" or point == COMMIT_CALLS):
            return


if __name__ == "__main__":
    main()
