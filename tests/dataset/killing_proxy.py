"""A proxy before a real object store that kills its client after a request was carried out."""

from __future__ import annotations

import os
import signal

from tests.servers.faults import FaultProxy, refused

_CHANGES = ("PUT", "POST", "DELETE")


class KillingProxy(FaultProxy):
    """``GET /die/PID/N``: kill this process once the store has carried out N changes of its.

    The client never gets the answer to the last of them.
    """

    def __init__(self, upstream) -> None:
        super().__init__(upstream)
        self._pid, self._left = 0, 0

    def fault_of(self, method, path):
        if not path.startswith("/die/"):
            return super().fault_of(method, path)
        self._pid, self._left = map(int, path.split("/")[2:])
        return refused(200)

    def forward(self, method, path, headers, body):
        answer = super().forward(method, path, headers, body)
        with self._lock:
            self._left -= method in _CHANGES
            if self._left == 0 and method in _CHANGES:
                os.kill(self._pid, signal.SIGKILL)
        return answer
