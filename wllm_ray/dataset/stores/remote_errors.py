"""What the object-store client's errors mean, in words that hold nothing of theirs.

The client quotes addresses, request headers and the server's answer, so none of its text is passed
on: a message is made of our own words, the HTTP status and the server's error code.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from obstore.exceptions import BaseError

from wllm_ray.errors import StorageError, WLLMError

__all__ = ["is_missing_bucket", "is_panic", "meaning", "storage_errors"]

_MISSING_BUCKET = "NoSuchBucket|ContainerNotFound|The specified bucket does not exist"
_REFUSED_CREDENTIALS = (
    "InvalidAccessKeyId|SignatureDoesNotMatch|AuthenticationFailed|AuthorizationFailure|"
    "InvalidToken|ExpiredToken|status code: 401"
)
_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AZURE_STORAGE_ACCOUNT_NAME and "
    "AZURE_STORAGE_ACCOUNT_KEY, or GOOGLE_APPLICATION_CREDENTIALS"
)
# The first that is found in the client's text tells; each says what to do.
_CLUES = (
    (
        "InvalidUri|RelativeUrlWithoutBase|InvalidPort",
        "an address is none; check AWS_ENDPOINT_URL or its like",
    ),
    ("InvalidHeaderValue", "a credential or a region holds a line break; set it without"),
    (
        "BadScheme",
        "the address is plain http; use https, or set AWS_ALLOW_HTTP=true (AZURE_…, GOOGLE_…)",
    ),
    (_MISSING_BUCKET, "there is no such bucket or container; create it, or correct the name"),
    # Where machines in a cloud find credentials; asked when there are none elsewhere.
    (
        r"//169\.254\.|metadata\.google\.internal|MissingAccount",
        f"no credentials were found; set {_CREDENTIALS}",
    ),
    (_REFUSED_CREDENTIALS, f"the credentials are wrong or have expired; check {_CREDENTIALS}"),
    ("status code: 403", "the credentials do not allow this; check what they may do there"),
    (
        "PermanentRedirect|AuthorizationHeaderMalformed|BareRedirect",
        "the bucket is in another region; set AWS_REGION",
    ),
    (
        "kind: Timeout|TimedOut|timed out",
        "no answer in time; check the address and the network, and run again",
    ),
    (
        "kind: Connect",
        "nobody answers at the address; check AWS_ENDPOINT_URL or its like, and the network",
    ),
    (
        "IncompleteMessage|response body error|ConnectionReset",
        "the connection broke off; check the network, and run again",
    ),
)


def is_missing_bucket(error: Exception) -> bool:
    """Whether it is not the object that is missing, but what holds it."""
    return re.search(_MISSING_BUCKET, str(error)) is not None


def is_panic(error: BaseException) -> bool:
    """Whether the client broke down, of which it tells by an error that is no ``Exception``."""
    return type(error).__name__ == "PanicException"


def meaning(error: BaseException, otherwise: str = "the request failed; run again") -> str:
    """What a client's error means and what to do, in our own words.

    Args:
        error: The client's.
        otherwise: What to say where its text has no clue.
    """
    text = str(error)
    if is_panic(error):
        otherwise = "the client broke down; check the addresses and credentials it is given"
    words = next((words for pattern, words in _CLUES if re.search(pattern, text)), otherwise)
    return f"{words} ({_facts(error, text)})"


def _facts(error: BaseException, text: str) -> str:
    """The error's type, the HTTP status and the server's code, such as ``NoSuchBucket``."""
    status = re.search(r"status code: (\d{3})\b", text)
    code = re.search(r"<Code>([A-Za-z]{1,60})</Code>", text)
    facts = [type(error).__name__]
    facts += [f"HTTP {status[1]}"] if status else []
    facts += [code[1]] if code else []
    return ", ".join(facts)


@contextlib.contextmanager
def storage_errors(verb: str, key: str, uri: str) -> Iterator[None]:
    """Turn the client's errors into ours.

    Raises:
        StorageError: Without the client's error as its cause, whose text a log would show.
    """
    try:
        yield
    except WLLMError:
        raise
    except FileNotFoundError as error:
        # Of one object it has been caught: what remains is a place that is not there.
        words = meaning(error) if is_missing_bucket(error) else _no_place(error)
        raise StorageError(f"could not {verb} {key} under {uri}: {words}") from None
    except BaseException as error:
        if not isinstance(error, (BaseError, OSError)) and not is_panic(error):
            raise
        raise StorageError(f"could not {verb} {key} under {uri}: {meaning(error)}") from None


def _no_place(error: Exception) -> str:
    return (
        f"the bucket, container or address is not there; check their names "
        f"({_facts(error, str(error))})"
    )
