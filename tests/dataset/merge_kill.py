"""Kill a merge before each of its writes, then run it again. Run by test_merge.py.

The process forks once for each point and never writes itself. Prints one JSON object per point.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from kill_points import in_child

from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.reading.verify import verify_dataset
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.dataset.tools.merge import merge_datasets
from wllm_ray.errors import NotFoundError


def doomed(sources, root, point):
    target = open_store(root)
    count = 0

    def mortal(real):
        def call(*args, **options):
            nonlocal count
            count += 1
            if count == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    target.put, target.put_content = mortal(target.put), mortal(target.put_content)
    merge_datasets(sources, ["a", "b"], "ab", to_root=target)
    return True


def look(sources, root):
    """What a reader finds after the crash, and what running the merge again makes of it."""
    try:
        found = len(load_dataset(root, "ab"))
    except NotFoundError:
        found = None
    made = merge_datasets(sources, ["a", "b"], "ab", to_root=root)
    report = verify_dataset(root, "ab")
    sound = report.ok and not report.notes
    return {"found": found, "manifest": made.manifest_sha256, "sound": sound}


def main():
    sources, roots = sys.argv[1], Path(sys.argv[2])
    for point in range(1, 1000):
        here = str(roots / str(point))
        survived = in_child(lambda here=here, point=point: doomed(sources, here, point))
        after = in_child(lambda here=here: look(sources, here))
        sys.stdout.write(json.dumps({"survived": survived} | after) + "\n")
        if survived:
            return


if __name__ == "__main__":
    main()
