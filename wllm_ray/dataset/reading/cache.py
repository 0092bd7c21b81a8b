"""What was read of a dataset and may be wanted again, within a bound."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

__all__ = ["BoundedCache"]

_Value = TypeVar("_Value")


class BoundedCache:
    """Keeps values up to so many bytes, or so many of them: those that were wanted last.

    Threads that want the same value wait for the one that loads it; loads of different values run
    side by side. A forked child begins with locks of its own: whoever held the parent's is not in
    it.

    Args:
        most: Bytes, or values, that are kept. A value that is larger is handed out and not kept.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._taken = 0
        self._renew()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def get(self, key: Hashable, load: Callable[[], tuple[_Value, int]]) -> _Value:
        """The value under a key, loaded where it is not kept.

        Args:
            key: What it is kept under.
            load: Makes the value, and says how much of the bound it takes up; what takes up
                nothing is kept for ever. What it raises reaches the caller, and nothing is kept.
        """
        if self._pid != os.getpid():
            self._renew()
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return cast("_Value", self._kept[key][0])
            loading = self._loading.setdefault(key, threading.Lock())
        with loading:
            with self._lock:
                if key in self._kept:
                    return cast("_Value", self._kept[key][0])
            try:
                value, size = load()
                self._keep(key, value, size)
            finally:
                with self._lock:
                    self._loading.pop(key, None)
        return value

    def _keep(self, key: Hashable, value: Any, size: int) -> None:
        with self._lock:
            if size > self.most or key in self._kept:
                return
            self._kept[key] = value, size
            self._taken += size
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        dropped = []
        # Thousands may be kept, and each that comes may drop one: only the oldest are looked at.
        for key, (_, size) in self._kept.items():
            if self._taken <= self.most:
                break
            if size:
                dropped.append(key)
                self._taken -= size
        for key in dropped:
            del self._kept[key]

    def _renew(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._loading: dict[Hashable, threading.Lock] = {}
