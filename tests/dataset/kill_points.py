"""Kill a writer before each system call that matters, then resume. Run by test_crash.py.

The process forks once for each point and never writes itself, so that every child starts from the
same clean state. Prints one JSON object per point.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from dataset_builders import FAILED_ROW, capture, make_rows, make_spec, rows_of

from wllm_ray.dataset.reader import load_dataset
from wllm_ray.dataset.store import open_store
from wllm_ray.dataset.writer import commit_manifest, create_spec, stage_shard, staged_shards
from wllm_ray.errors import NotFoundError

ASKED = {
    "position": "all_prompt",
    "sites": ("embed", "L1_attn_out_prelinear"),
    "site_widths": (4, 6),
}
CALLS = ("mkdir", "write", "fsync", "link", "replace", "unlink")


def write(root):
    """The job: what a resubmission runs, too."""
    store = open_store(root)
    rows = make_rows(5, failed=[FAILED_ROW])
    spec = make_spec(rows, **ASKED)
    create_spec(store, spec)
    done = staged_shards(store, spec)
    for shard in range(len(spec.shards)):
        if shard not in done:
            part = rows_of(spec, rows, shard)
            stage_shard(store, spec, shard, part, [capture(part, spec)])
    return commit_manifest(store, "d"), len(done)


def die_before(point):
    """Make the ``point``-th of the calls end this process as the kernel would."""
    count = 0

    def counted(real):
        def call(*args, **options):
            nonlocal count
            count += 1
            if count == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def in_child(work):
    """Run ``work`` in a child; its result as JSON, or None where it was killed."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        data = json.dumps(work()).encode()
        os.write(send, data)
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    return json.loads(data) if data else None


def doomed(root, point):
    die_before(point)
    write(root)
    die_before(0)  # the answer to the parent is not one of the points
    return True


def look(root):
    """What a reader finds after the crash, and what a resubmission makes of it."""
    try:
        found = len(load_dataset(root, "d", verify="full"))
    except NotFoundError:
        found = None
    manifest, resumed = write(root)
    return {
        "found": found,
        "resumed": resumed,
        "content": manifest.content_sha256,
        "rows": load_dataset(root, "d", verify="full").row_ids,
        "temporary": sum(1 for _ in Path(root).rglob(".tmp-*")),
    }


def main():
    root = Path(sys.argv[1])
    for point in range(1, 1000):
        here = str(root / str(point))
        survived = in_child(lambda here=here, point=point: doomed(here, point))
        after = in_child(lambda here=here: look(here))
        sys.stdout.write(json.dumps({"point": point, "survived": survived} | after) + "\n")
        if survived:
            return


if __name__ == "__main__":
    main()
