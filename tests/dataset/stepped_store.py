"""Writers that do one storage operation at a time, when told to, and can die at any of them.

A writer is a thread that waits before every operation on its store, so a test decides which of
several writers is next and what becomes of the operation. Only one thread runs at any time.
"""

from __future__ import annotations

import threading
from enum import Enum

from wllm_ray.errors import StorageError

_CHANGES = ("put", "put_content", "delete")


class Fault(Enum):
    """What becomes of one operation."""

    NONE = ""
    REFUSED = "not done, and the writer is told"
    LOST = "done, and the answer is lost"
    DIES_BEFORE = "the writer dies before it"
    DIES_AFTER = "the writer dies after it"


class Died(BaseException):
    """The process is gone; no error, since nothing catches it."""


class SteppedStore:
    """A store whose every operation waits for its writer's turn."""

    def __init__(self, store, writer) -> None:
        self._store, self._writer = store, writer
        self.uri = store.uri
        self.local_path = store.local_path

    def __getattr__(self, name):
        operation = getattr(self._store, name)

        def stepped(*args, **options):
            fault = self._writer.wait_for_turn()
            self._writer.changed |= name in _CHANGES
            if fault is Fault.DIES_BEFORE:
                raise self._writer.dies()
            if fault is Fault.REFUSED:
                raise StorageError(f"{name} was refused")
            result = operation(*args, **options)
            if fault is Fault.DIES_AFTER:
                raise self._writer.dies()
            if fault is Fault.LOST:
                raise StorageError(f"the answer to {name} was lost")
            return result

        return stepped


class Writer:
    """Runs ``work(writer, store)`` step by step.

    Attributes:
        result: What ``work`` returned.
        error: What it raised.
        ended: Nothing of it is left to run.
        faulted: An operation of it was refused, or its answer was lost.
        operations: How many it began.
        changed: It may have changed the store in its last step.
    """

    def __init__(self, store, work) -> None:
        self.result = None
        self.error: BaseException | None = None
        self.ended = self.faulted = self.changed = False
        self.operations = 0
        self._dead = False
        self._fault = Fault.NONE
        self._turn, self._yielded = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(
            target=self._run, args=(SteppedStore(store, self), work), daemon=True
        )
        self._thread.start()
        self._yielded.acquire()

    def step(self, fault=Fault.NONE) -> None:
        """Let it run up to its next operation, or its end."""
        self.faulted |= fault in (Fault.REFUSED, Fault.LOST)
        self._fault, self.changed = fault, False
        self._turn.release()
        self._yielded.acquire()
        if self.ended:
            self._thread.join()

    def run(self) -> None:
        """Let it run to its end."""
        while not self.ended:
            self.step()

    def kill(self) -> None:
        """End it where it stands."""
        if not self.ended:
            self.step(Fault.DIES_BEFORE)

    def wait_for_turn(self) -> Fault:
        if self._dead:  # clean-up code that would not have run
            raise Died
        self.operations += 1
        self._yielded.release()
        self._turn.acquire()
        return self._fault

    def dies(self) -> Died:
        self._dead = True
        return Died()

    def _run(self, store, work) -> None:
        try:
            self.result = work(self, store)
        except BaseException as error:  # noqa: BLE001 (the test looks at it)
            self.error = error
        self.ended = True
        self._yielded.release()


class InlineExecutor:
    """Stands for ThreadPoolExecutor: what a writer's own threads would do, in its one thread."""

    def __init__(self, *_args, **_options) -> None:
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        return None

    def map(self, work, *items):
        return [work(*one) for one in zip(*items, strict=True)]
