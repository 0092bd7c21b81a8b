"""The object-store client of a URI, with time-outs that end.

The client reads credentials, addresses and regions from the environment itself.
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Any

from obstore.exceptions import BaseError
from obstore.store import MemoryStore, from_url

from wllm_ray.dataset.stores.environment import check_environment
from wllm_ray.dataset.stores.remote_errors import is_panic, meaning
from wllm_ray.errors import InvalidInputError, StorageError

__all__ = ["expect_not_forked", "open_client"]

# A host that is up takes a connection in far less; one that is not should not hold up a job.
CONNECT_TIMEOUT = timedelta(seconds=5)
# Silence after which a request is given up. It counts from the request's start, so this is also
# the time that the upload of one part may take: 8 MiB in 20 s is 0.4 MiB/s per connection.
READ_TIMEOUT = timedelta(seconds=20)
# A whole answer, such as a shard of 64 MiB at 0.5 MiB/s.
REQUEST_TIMEOUT = timedelta(seconds=120)
# No further try of one request after this long. Stores answer 503 while they grow, for seconds.
RETRY_TIMEOUT = timedelta(seconds=30)
MAX_RETRIES = 6
FIRST_BACKOFF, MAX_BACKOFF = timedelta(milliseconds=100), timedelta(seconds=5)

_PREFIXES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
# The client reads these from the environment only where it is given none, and we give some.
_FROM_ENVIRONMENT = (
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "proxy_ca_certificate",
    "proxy_excludes",
    "proxy_url",
    "read_timeout",
    "root_certificate",
    "timeout",
)

# One store per name and process: what two callers of memory://x share.
_memory_stores: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()
# Numbers of the processes that have used a client; a fork inherits its parent's.
_users: set[int] = set()


def open_client(uri: str) -> Any:
    """The client of ``memory://``, ``s3://``, ``gs://`` or ``az://``; connects to nothing yet.

    Raises:
        InvalidInputError: The client cannot read the URI or its environment
            (code ``invalid_argument``).
    """
    if uri.startswith("memory://"):
        with _memory_lock:
            return _memory_stores.setdefault(uri, MemoryStore())
    retry: Any = {
        "max_retries": MAX_RETRIES,
        "retry_timeout": RETRY_TIMEOUT,
        "backoff": {"init_backoff": FIRST_BACKOFF, "max_backoff": MAX_BACKOFF, "base": 2},
    }
    check_environment(uri.partition("://")[0])
    try:
        return from_url(uri, client_options=_options(uri), retry_config=retry)
    except BaseException as error:
        if not isinstance(error, (BaseError, ValueError)) and not is_panic(error):
            raise
        words = meaning(error, "check its form, SCHEME://BUCKET/FOLDER, and the environment")
        raise InvalidInputError(
            f"cannot open the storage root {uri!a}: {words}", code="invalid_argument"
        ) from None


def expect_not_forked(uri: str) -> None:
    """Refuse a process forked from one that has used a client: without its threads it would hang.

    Raises:
        StorageError: The message says how to start processes instead.
    """
    if _users and os.getpid() not in _users:
        raise StorageError(
            f"could not reach {uri}: this process was forked from one that has used an object "
            f"store, which that client does not survive. Start processes by spawn, not fork: "
            f"multiprocessing.get_context('spawn'), or multiprocessing_context='spawn' of a "
            f"torch DataLoader"
        )
    _users.add(os.getpid())


def _options(uri: str) -> Any:
    """Our time-outs, and whatever the environment says of the client's other options."""
    prefix = _PREFIXES[uri.partition("://")[0]]
    asked = {name: os.environ.get(prefix + name.upper()) for name in _FROM_ENVIRONMENT}
    ours: dict[str, Any] = {
        "connect_timeout": CONNECT_TIMEOUT,
        "read_timeout": READ_TIMEOUT,
        "timeout": REQUEST_TIMEOUT,
    }
    return ours | {name: value for name, value in asked.items() if value is not None}
