"""A proxy before a real object store that does to each request what a script says.

What the store itself does stays real: conditions, ranges, uploads in parts.
"""

from __future__ import annotations

import contextlib
import http.client
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import urlsplit

_HOP_BY_HOP = ("connection", "transfer-encoding", "content-length", "date", "server")


@dataclass(frozen=True)
class Fault:
    """What becomes of one request.

    Attributes:
        is_done: The store hears of it.
        status: The answer instead of the store's own; None for the store's.
        body: The body of that answer.
        cut: Bytes of the body after which the connection ends; -1 for not even an answer.
        stalls: Nothing more comes after ``cut``, and the connection stays open.
    """

    is_done: bool = True
    status: int | None = None
    body: bytes = b""
    cut: int | None = None
    stalls: bool = False


LOST = Fault(cut=-1)
DROPPED = Fault(is_done=False, cut=-1)
STALLED = Fault(is_done=False, cut=-1, stalls=True)


def refused(status, code="Refused"):
    """An answer of the store's kind, with nothing done."""
    return Fault(is_done=False, status=status, body=f"<Error><Code>{code}</Code></Error>".encode())


class _Answer(NamedTuple):
    status: int
    headers: list[tuple[str, str]]
    body: bytes


class FaultProxy:
    """Forwards to ``upstream``; requests that match the script meet its faults, in order.

    Attributes:
        port: Where it listens, on the loopback interface.
        heard: (method, path with query) of every request.
        most_at_once: How many requests the store had at the same time.
        answered: Bytes of all bodies that were sent to the client.
    """

    def __init__(self, upstream) -> None:
        self._upstream = urlsplit(upstream).netloc
        self._script: list[tuple[str, Fault]] = []
        self._lock = threading.Condition()
        self._ended = threading.Event()
        self.heard: list[tuple[str, str]] = []
        self._under_way = self.most_at_once = self.answered = 0
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.port = self._server.server_address[1]

    @contextlib.contextmanager
    def running(self):
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    def script(self, *faults, on):
        """Let the next requests whose ``METHOD path`` holds ``on`` meet these faults."""
        with self._lock:
            self._script += [(on, fault) for fault in faults]

    def clear(self):
        """Forget what is left of the script, and what was heard."""
        with self._lock:
            # What a client gave up in the test before may be on its way to the store still.
            assert self._lock.wait_for(lambda: not self._under_way, timeout=60)
            self._script.clear()
            self.heard.clear()
            self.most_at_once = self.answered = 0

    def fault_of(self, method, path) -> Fault:
        with self._lock:
            self.heard.append((method, path))
            for at, (on, fault) in enumerate(self._script):
                if on in f"{method} {path}":
                    del self._script[at]
                    return fault
        return Fault()

    @contextlib.contextmanager
    def _counted(self):
        with self._lock:
            self._under_way += 1
            self.most_at_once = max(self.most_at_once, self._under_way)
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1
                self._lock.notify_all()

    def forward(self, method, path, headers, body) -> _Answer:
        connection = http.client.HTTPConnection(self._upstream, timeout=30)
        with self._counted(), contextlib.closing(connection):
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return _Answer(answer.status, answer.getheaders(), answer.read())

    def count(self, body):
        with self._lock:
            self.answered += len(body)

    def stall(self):
        self._ended.wait(60)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_) -> None:
        """A client that has had enough of a fault goes away in the middle; that is no error."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else every body waits 40 ms for an acknowledgement
    proxy: FaultProxy

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.proxy.fault_of(self.command, self.path)
        answer = _Answer(fault.status or 500, [], fault.body)
        if fault.is_done:
            heard = self.proxy.forward(self.command, self.path, dict(self.headers), body)
            answer = heard if fault.status is None else answer
        if fault.cut != -1:
            self._answer(answer, fault.cut)
        if fault.stalls:
            self.proxy.stall()
        if fault.cut is not None:
            self.close_connection = True

    def _answer(self, answer, cut) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers:
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        length = dict(answer.headers).get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.proxy.count(answer.body[:cut])
            self.wfile.write(answer.body[:cut])
            self.wfile.flush()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle  # noqa: N815 (names of the library)

    def log_message(self, *_) -> None:
        """Quiet."""
