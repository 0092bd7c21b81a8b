"""Where Ray keeps the token of a cluster that asks for one.

Since Ray 2.60 a cluster that is started on a machine asks for a token by default, also its
dashboard. The order is Ray's own: the variable, then the file that the other variable names, then
the file that Ray writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from wllm_ray.errors import InvalidInputError, UnauthorizedError

__all__ = ["HOW_TO_AUTHENTICATE", "ray_token", "why_refused"]

NO_TOKEN_SENT = 401  # Ray answers 403 to a wrong one
HOW_TO_AUTHENTICATE = (
    "set RAY_AUTH_TOKEN to the cluster's token, or RAY_AUTH_TOKEN_PATH to a file that holds it; on "
    "the machine that started the cluster it is in ~/.ray/auth_token (`ray get-auth-token`)"
)


def ray_token(environment: Mapping[str, str], home: Path) -> str | None:
    """The token that Ray itself would send, or None where there is none.

    Raises:
        InvalidInputError: ``RAY_AUTH_TOKEN_PATH`` names a file without a token.
    """
    if token := environment.get("RAY_AUTH_TOKEN"):
        return token
    if path := environment.get("RAY_AUTH_TOKEN_PATH"):
        if token := _read(Path(path)):
            return token
        raise InvalidInputError(
            f"expected Ray's token in {path}, which RAY_AUTH_TOKEN_PATH names; the file cannot be "
            f"read or is empty",
            code="invalid_argument",
        )
    return _read(home / ".ray" / "auth_token")


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def why_refused(error: UnauthorizedError) -> str:
    """Whether no token was sent, or a wrong one."""
    missing = error.details.get("status") == NO_TOKEN_SENT
    return "asks for a token, and none was found" if missing else "refuses the token that was sent"
