"""Lines of JSONL that are what nearly all are, read in a third of the time.

A line that is anything else is left to :mod:`wllm_ray.rows`, which also says what is wrong with it.
What is read here is to the last byte what is read there; a test compares them.
"""

from __future__ import annotations

import msgspec

from wllm_ray.records import InputRow

__all__ = ["usual_row"]

MAX_ID_BYTES = 512
# Far below the most that metadata may have, and far above what they mostly have.
_SHORT_METADATA = 4096
# The texts of `"id":"…","prompt":"…"`.
_QUOTED_ALWAYS = 4
_SCALARS = frozenset({str, int, bool, type(None)})


class _Line(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    id: str
    prompt: str
    # A float is read so that a number with a point is told from an integer.
    metadata: dict[str, str | int | float | bool | None] | msgspec.UnsetType = msgspec.UNSET


_decode = msgspec.json.Decoder(_Line).decode
# Keys in the order of their code points, no blanks.
_encode = msgspec.json.Encoder(order="deterministic").encode


def usual_row(line: bytes) -> InputRow | None:
    """A row with an id in ASCII, a prompt, and flat metadata without floats; None for all others.

    Args:
        line: Without its end.
    """
    try:
        read = _decode(line)
    except (msgspec.MsgspecError, UnicodeError):
        return None
    row_id, metadata, quoted = read.id, read.metadata, _QUOTED_ALWAYS
    if not row_id.isascii() or not 0 < len(row_id) <= MAX_ID_BYTES:
        return None
    if metadata is msgspec.UNSET:
        metadata = {}
    else:
        types = list(map(type, metadata.values()))
        if not _SCALARS.issuperset(types):
            return None
        quoted += 1 + len(types) + types.count(str)
    if not _has_texts(line, quoted):
        return None
    try:
        text = _encode(metadata)
    except (msgspec.MsgspecError, OverflowError):
        return None
    # Which characters are escaped, and how, is for others to say.
    if b"\\" in text or len(text) > _SHORT_METADATA:
        return None
    return InputRow(row_id, {"prompt": read.prompt}, text.decode())


def _has_texts(line: bytes, count: int) -> bool:
    """Whether a line of valid JSON holds so many texts, keys among them.

    Where a key occurs twice there are more than in what was read, which has only the last.
    """
    if b"\\" in line:
        # What is left of a run of backslashes escapes what follows.
        line = line.replace(b"\\\\", b"").replace(b'\\"', b"")
    return line.count(b'"') == 2 * count
