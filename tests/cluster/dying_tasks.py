"""A job driver whose stage tasks die once for each shard, between two of their writes.

The task process kills itself right after its first file has its final name (even shards), or after
its second (odd shards), so data lie there without a receipt. Ray then runs the task again.
"""

import os
import signal
from pathlib import Path

import ray

from deployments import backend
from deployments.job import main
from deployments.tasks import stage_shard

MARKS = "WLLM_TEST_MARKS"


def die_after(files: int) -> None:
    replace, named = os.replace, []

    def counted(*args, **options):
        replace(*args, **options)
        named.append(args)
        if len(named) == files:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = counted


@ray.remote(num_cpus=0, max_retries=3)
def dying_stage_shard(marks, root, spec, shard, chunks):
    mark = Path(marks) / f"shard-{shard.index}"
    if not mark.exists():
        mark.touch()
        die_after(1 + shard.index % 2)
    return stage_shard._function(root, spec, shard, chunks)


class Dying:
    """Stands where the backend expects the stage task."""

    @staticmethod
    def remote(*args):
        return dying_stage_shard.remote(os.environ[MARKS], *args)


if __name__ == "__main__":
    backend.stage_shard = Dying
    main()
