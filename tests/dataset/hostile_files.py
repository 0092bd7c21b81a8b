"""Lies in the folder: files that are missing, cut off, exchanged, flipped, or no files at all."""

from __future__ import annotations

import os

import numpy as np
from forging import flipped, replaced
from hostile_lies import Lie


def on_path(role, do):
    return lambda forgery: do(forgery.path(role))


def remade(make):
    """Put something else in the file's place."""

    def do(path):
        path.unlink()
        make(path)

    return do


def linked_outside(path):
    outside = path.parents[3] / f"outside-{path.name}"
    path.rename(outside)
    path.symlink_to(outside)


def folder_outside(forgery):
    outside = forgery.folder.parents[2] / "outside"
    forgery.folder.rename(outside)
    forgery.folder.symlink_to(outside)


def exchanged(role, first, second):
    """Exchange the contents of two files of a role: (shard, number)."""

    def tell(forgery):
        paths = [forgery.path(role, *one) for one in (first, second)]
        contents = [path.read_bytes() for path in paths]
        for path, data in zip(paths, contents[::-1], strict=True):
            path.write_bytes(data)
        forgery.damaged = paths[0]

    return tell


def documents_exchanged(forgery):
    one, two = (forgery.folder / f"shard-0000{n}.receipt.json" for n in (0, 1))
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)
    forgery.damaged = one


def document(name, do):
    def tell(forgery):
        forgery.damaged = forgery.folder / name
        do(forgery.damaged)

    return tell


def rewritten(change):
    return lambda path: path.write_bytes(change(path.read_bytes()))


def of_another_capture(data):
    """The same rows, sites, shape and size, and other values."""
    return data[:128] + (np.frombuffer(data[128:], "<f4") * 2).tobytes()


def flip_value(data):
    return flipped(data.index(np.float32(1000).tobytes()))(data)


SPEC, RECEIPT = "spec.json", "shard-00000.receipt.json"
IN_PLACE = {
    "missing": (lambda path: path.unlink(), "file_missing"),
    "renamed": (lambda path: path.rename(path.with_name(f"{path.name}~")), "file_missing"),
    "a folder": (remade(os.mkdir), "file_missing"),
    "a pipe": (remade(os.mkfifo), "file_missing"),
    "a link to nowhere": (remade(lambda path: path.symlink_to("nowhere")), "file_missing"),
    "a link to itself": (remade(lambda path: path.symlink_to(path.name)), "file_missing"),
    "a link out of the root": (linked_outside, "name_invalid"),
    "empty": (rewritten(lambda _: b""), "size_mismatch"),
    "cut off": (rewritten(lambda data: data[:-1]), "size_mismatch"),
    "half": (rewritten(lambda data: data[: len(data) // 2]), "size_mismatch"),
    "longer": (rewritten(lambda data: data + b"\0"), "size_mismatch"),
    "twice": (rewritten(lambda data: data * 2), "size_mismatch"),
}
FOLDER = {
    **{
        f"{role}, {base}: {name}": Lie(on_path(role, do), code, "open", base)
        for base, role in (
            ("npy", "features"),
            ("npy", "rows"),
            ("arrow", "features"),
            ("traces", "trace"),
        )
        for name, (do, code) in IN_PLACE.items()
    },
    **{
        f"{name}: {how}": Lie(document(name, do), code, "verify")
        for name in (SPEC, RECEIPT)
        for how, do, code in (
            ("missing", lambda path: path.unlink(), "file_missing"),
            ("a folder", remade(os.mkdir), "file_missing"),
            ("a pipe", remade(os.mkfifo), "file_missing"),
            ("empty", rewritten(lambda _: b""), "digest_mismatch"),
            ("cut off", rewritten(lambda data: data[:-1]), "digest_mismatch"),
            ("flipped", rewritten(flipped(0.5)), "digest_mismatch"),
            ("longer", rewritten(lambda data: data + b"\n"), "digest_mismatch"),
            ("of another spec", rewritten(replaced(b'"rows":', b'"rowz":')), "digest_mismatch"),
        )
    },
    "receipts exchanged": Lie(documents_exchanged, "digest_mismatch", "verify"),
    "the folder is a link out of the root": Lie(folder_outside, "name_invalid", "open"),
    "files of two sites exchanged": Lie(
        exchanged("features", (0, 0), (0, 1)), "size_mismatch", "open", "sites"
    ),
    "features of another capture": Lie(
        lambda f: f.change("features", of_another_capture), "digest_mismatch", "access"
    ),
    "features, arrow: a bit of a value": Lie(
        lambda f: f.change("features", flip_value), "digest_mismatch", "access", "arrow"
    ),
    "features, npy: a bit of the magic": Lie(
        lambda f: f.change("features", flipped(1)), "array_invalid", "access"
    ),
    "features, npy: a bit of the dtype": Lie(
        lambda f: f.change("features", flipped(22)), "array_invalid", "access"
    ),
    "features, npy: a bit of the padding": Lie(
        lambda f: f.change("features", flipped(126)), "array_invalid", "access"
    ),
    **{
        f"{role}, {base}: a bit at {place}": Lie(
            lambda f, role=role, place=place: f.change(role, flipped(place)),
            "digest_mismatch",
            "access",
            base,
        )
        for base, role, places in (
            ("npy", "features", (128, 0.95, -1)),
            ("npy", "rows", (0, 9, 0.1, 0.3, 0.5, 0.7, 0.9, -1)),
            ("traces", "trace", (0, 9, 0.1, 0.5, 0.9, -1)),
        )
        for place in places
    },
}
