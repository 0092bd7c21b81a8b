"""Every way that we know in which a dataset can lie, each with the code that refuses it."""

from __future__ import annotations

from hostile_documents import DOCUMENTS, at
from hostile_files import FOLDER, flip_value
from hostile_lies import CONTRADICTS, Lie
from hostile_tables import ARROW, DEEP, NPY, ROWS, SIZE, TEXTS_OF_ROWS, TRACES


def forged(role, change, *, by_name=True):
    """Forge a file; ``by_name`` says whether it will be found out, and not the manifest."""

    def tell(forgery):
        forgery.forge(role, change)
        forgery.seal()
        if not by_name:
            forgery.damaged = None

    return tell


def manifest_alone(change):
    """Its own digests are right, and its receipts say something else."""

    def tell(forgery):
        change(forgery.manifest)
        forgery.seal_manifest()

    return tell


FORGED = {
    f"forged {role}, {base}: {name}": Lie(
        forged(role, change, by_name=code != SIZE),
        code or "array_invalid",
        "open" if code == SIZE else stage,
        base,
    )
    for role, base, stage, lies in (
        ("features", "npy", "access", NPY),
        ("rows", "npy", "access", ROWS),
        ("rows", "npy", "access", TEXTS_OF_ROWS),
        ("rows", "npy", "verify", DEEP),
        ("features", "arrow", "access", ARROW),
        ("trace", "traces", "access", TRACES),
    )
    for name, (change, code) in lies.items()
} | {
    "a vector of zeros": Lie(
        forged("features", lambda data: data[:-16] + bytes(16)), CONTRADICTS, "verify"
    ),
    "features that their traces do not give": Lie(
        forged("features", flip_value), CONTRADICTS, "verify", "traces"
    ),
    "versions that no receipt names": Lie(
        manifest_alone(at("versions", "numpy", to="9")), CONTRADICTS, "verify"
    ),
    "a self-test that no receipt names": Lie(
        manifest_alone(at("selftest", "passed", to=False)), CONTRADICTS, "verify"
    ),
}
LIES = DOCUMENTS | FOLDER | FORGED

# Those that promise more than there is.
HUGE = [
    name
    for name in LIES
    if any(word in name for word in ("terabyte", "gigabyte", "2^40", "address space", "digits"))
]
