"""One thread that owns the engine and keeps stepping it while there is work.

Any thread or event loop may submit chunks; chunks with different sites share forward passes. The
thread takes commands between passes, so nothing else ever touches the engine.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, TypeVar

from wllm_ray.capture.admission import Admission, PassPlan
from wllm_ray.capture.coverage import CaptureRow, ChunkCapture
from wllm_ray.capture.vllm_driver import Finished, VLLMDriver
from wllm_ray.errors import CaptureError

__all__ = ["EngineLoop", "Job"]

_log = logging.getLogger(__name__)
T = TypeVar("T")
# A pass that hangs must not keep the replica from exiting.
_CLOSE_LIMIT_S = 60.0


@dataclass(eq=False, slots=True)
class Job:
    """A chunk on its way through the engine.

    Attributes:
        capture: The chunk's buffers.
        done: Resolves to the job when every row has ended, or to an error for the whole chunk.
        submitted, started, finished: Monotonic seconds.
    """

    capture: ChunkCapture
    done: Future[Job] = field(default_factory=Future)
    left: int = 0
    submitted: float = 0.0
    started: float | None = None
    finished: float = 0.0

    def timings(self) -> dict[str, float]:
        """Seconds in the queue, and from the first pass to the last."""
        started = self.finished if self.started is None else self.started
        return {"queue": started - self.submitted, "capture": self.finished - started}


class EngineLoop:
    """Runs jobs on an engine that ``build`` makes on the loop's own thread.

    Args:
        build: Makes the driver; called once, on the engine's thread.
        progress_limit_s: A pass that takes longer is taken for a dead engine by :meth:`check`.

    Attributes:
        driver: The engine, from :meth:`start` to :meth:`close`; for the engine's thread.
        strict_splits: Fail rows that the scheduler split otherwise than planned, because their
            bits then depend on what else ran.
    """

    def __init__(self, build: Callable[[], VLLMDriver], *, progress_limit_s: float) -> None:
        self._build = build
        self._progress_limit_s = progress_limit_s
        self.strict_splits = True
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ready: Future[None] = Future()
        self.driver: VLLMDriver
        self._jobs: dict[str, tuple[Job, CaptureRow]] = {}
        self._fatal: Exception | None = None
        self._closing = False
        self._pass_started: float | None = None
        self._fillers = itertools.count()
        self._thread = threading.Thread(target=self._main, name="wllm-engine", daemon=True)

    def start(self) -> None:
        """Build the engine and wait for it; what the build raises is raised here."""
        self._thread.start()
        self._ready.result()

    def submit(self, capture: ChunkCapture) -> Job:
        """Queue a chunk; from any thread."""
        job = Job(capture, submitted=time.monotonic())
        job.done.set_running_or_notify_cancel()
        self._send(lambda: self._accept(job), job.done)
        return job

    def cancel(self, job: Job) -> None:
        """Stop a chunk and free what it holds; from any thread."""
        error = CaptureError("the chunk was cancelled", code="capture_failed")
        self._commands.put(lambda: self._drop(job, error))

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread, between passes."""
        result: Future[T] = Future()

        def command() -> None:
            try:
                _settle(result, function())
            except Exception as error:  # noqa: BLE001 (handed to the caller)
                _settle(result, error)

        self._send(command, result)
        return result.result()

    def check(self) -> None:
        """Raise ``CaptureError`` (``engine_dead``) unless the engine lives and makes progress."""
        if self._fatal is not None or self._closing or not self._thread.is_alive():
            raise self._gone()
        started = self._pass_started
        if started is not None and time.monotonic() - started > self._progress_limit_s:
            raise CaptureError(
                f"one forward pass has been running for over {self._progress_limit_s} s",
                code="engine_dead",
            )

    def close(self) -> None:
        """Stop the thread after the pass that runs now; work in flight fails."""
        if not self._closing:
            self._closing = True
            self._commands.put(lambda: None)
        self._thread.join(_CLOSE_LIMIT_S)
        if self._thread.is_alive():
            _log.error("the engine did not stop within %s s; its pass hangs", _CLOSE_LIMIT_S)

    def _send(self, command: Callable[[], None], result: Future[Any]) -> None:
        self._commands.put(command)
        # The thread may have ended before it saw the command; nobody else would answer it.
        if self._fatal is not None or self._closing or not self._thread.is_alive():
            self._refuse(result)

    def _refuse(self, result: Future[Any]) -> None:
        _settle(result, self._gone())

    def _gone(self) -> CaptureError:
        """Why there is no engine any more; a new exception for each who asks."""
        error = self._fatal
        if error is None:
            return CaptureError("the engine is closed", code="engine_dead")
        reason = (
            error.message
            if isinstance(error, CaptureError)
            else f"the engine failed ({type(error).__name__}; the log has more)"
        )
        gone = CaptureError(f"{reason}; the replica must be replaced", code="engine_dead")
        gone.__cause__ = error
        return gone

    def _main(self) -> None:
        try:
            self.driver = self._build()
        except BaseException as error:  # noqa: BLE001 (raised again where start() waits)
            self._ready.set_exception(error)
            return
        self._admission: Admission[str] = Admission(self.driver.limits)
        self._ready.set_result(None)
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 (whatever it was, the engine is lost)
            _log.error("the engine failed", exc_info=error)
            self._fatal = error
        finally:
            self._shut_down()

    def _serve(self) -> None:
        while not self._closing:
            self._take_commands()
            if len(self._admission):
                self._one_pass()

    def _take_commands(self) -> None:
        """Run what was asked since the last pass; wait where there is nothing else to do."""
        if not len(self._admission):
            self._commands.get()()
        while True:
            try:
                self._commands.get_nowait()()
            except queue.Empty:
                return

    def _accept(self, job: Job) -> None:
        job.left = len(job.capture.rows)
        if job.left == 0:
            self._complete(job)
        for row in job.capture.rows:
            self._jobs[row.request_id] = (job, row)
            self._admission.add(row.request_id, len(row.wanted.token_ids))

    def _one_pass(self) -> None:
        plan = self._admission.next_pass()
        self._hand_over(plan)
        self.driver.capture.ran = None
        self._pass_started = time.monotonic()
        try:
            finished = self.driver.step()
        finally:
            self._pass_started = None
        self._account(plan)
        for one in finished:
            self._end(one)

    def _hand_over(self, plan: PassPlan[str]) -> None:
        for request_id in plan.admitted:
            job, row = self._jobs[request_id]
            job.started = job.started or time.monotonic()
            self.driver.capture.reserve(row)
            self.driver.add(
                request_id,
                row.wanted.token_ids.tolist(),
                wanted=job.capture.wanted,
                num_logprobs=job.capture.num_logprobs,
            )
        if plan.filler_tokens:
            filler = list(range(plan.filler_tokens))
            self.driver.add(f"wllm-filler-{next(self._fillers)}", filler)

    def _account(self, plan: PassPlan[str]) -> None:
        """Compare what ran with what was planned; the runner's own numbers are the truth."""
        ran = self.driver.capture.ran
        for request_id, tokens in plan.tokens.items():
            start = self._admission.start_of(request_id)
            planned = (start, start + tokens)
            # Rows of a pass that could not be read have failed already.
            found = planned if ran is None else ran.get(request_id, (start, start))
            self._admission.ran(request_id, found[1])
            if found != planned and self.strict_splits:
                self._jobs[request_id][1].fail(
                    "engine_failed",
                    f"the scheduler ran positions {found[0]} to {found[1]} of the row in a pass "
                    f"where {planned[0]} to {planned[1]} were planned, so that its bits would "
                    "depend on other rows",
                )

    def _end(self, one: Finished) -> None:
        self.driver.capture.release(one.request_id)
        found = self._jobs.pop(one.request_id, None)
        if found is None:
            return
        job, row = found
        self._admission.end(one.request_id)
        row.logprobs = one.logprobs
        if one.error is not None:
            row.fail("engine_failed", one.error)
        job.left -= 1
        if job.left == 0:
            self._complete(job)

    def _complete(self, job: Job) -> None:
        job.finished = time.monotonic()
        _settle(job.done, job)

    def _drop(self, job: Job, error: CaptureError) -> None:
        ids = {row.request_id for row in job.capture.rows} & self._jobs.keys()
        self._admission.drop(ids)
        self.driver.abort(sorted(ids))
        for request_id in ids:
            self.driver.capture.release(request_id)
            del self._jobs[request_id]
        _settle(job.done, error)

    def _shut_down(self) -> None:
        self._closing = True
        self._refuse_waiting()
        try:
            self.driver.close()
        except Exception:  # noqa: BLE001 (nothing waits for it any more)
            _log.exception("the engine did not shut down cleanly")
        del self.driver

    def _refuse_waiting(self) -> None:
        """Answer everybody: what came too late is accepted only to be refused with the rest."""
        while True:
            try:
                self._commands.get_nowait()()
            except queue.Empty:
                break
        for job in {id(job): job for job, _ in self._jobs.values()}.values():
            _settle(job.done, self._gone())
        self._jobs.clear()


def _settle(result: Future[Any], outcome: object) -> None:
    """Resolve a future once; a second outcome is too late to matter."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            result.set_exception(outcome)
        else:
            result.set_result(outcome)
