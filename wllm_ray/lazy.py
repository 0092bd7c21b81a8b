"""Attributes that are made at first access, without a lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

__all__ = ["lazy"]

Value = TypeVar("Value")


class lazy(Generic[Value]):  # noqa: N801 (a decorator, as `cached_property`)
    """As :func:`functools.cached_property` is from Python 3.12 on.

    Before, that one holds a lock for each attribute of a class, whatever the object: two datasets
    wait for each other, and a child that is forked meanwhile waits for ever. Here threads that come
    at once may each make the value, and all are given the one that was kept.
    """

    def __init__(self, make: Callable[[Any], Value]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...

    def __get__(self, instance: object | None, owner: type) -> Self | Value:
        if instance is None:
            return self
        # Later accesses find it in the object itself, and do not come here.
        value: Value = instance.__dict__.setdefault(self._name, self._make(instance))
        return value
