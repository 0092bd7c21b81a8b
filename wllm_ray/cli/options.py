"""Options that several commands share, and what their texts mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, get_args

import typer

from wllm_ray.errors import InvalidInputError

if TYPE_CHECKING:
    from wllm_ray.requests import Selection, Served

__all__ = [
    "LOCAL_APPLICATION",
    "LOCAL_DASHBOARD",
    "AsJson",
    "BaseUrl",
    "BatchSize",
    "DatasetId",
    "Dtype",
    "Format",
    "FullTrace",
    "Layers",
    "Layout",
    "Mixed",
    "Position",
    "Quiet",
    "Resume",
    "RowsPerShard",
    "SiteKind",
    "Sites",
    "batch_size_of",
    "selection_of",
]

LOCAL_APPLICATION = "http://127.0.0.1:8000"
LOCAL_DASHBOARD = "http://127.0.0.1:8265"

AsJson = Annotated[bool, typer.Option("--json", help="One JSON line instead of text.")]
BaseUrl = Annotated[str, typer.Option(help="Where the application listens.")]
Layers = Annotated[
    list[str] | None,
    typer.Option(help="Zero-based blocks: `12`, `0,5,9` or `all`; may be repeated."),
]
SiteKind = Annotated[str, typer.Option(help="Site kind for --layer; `block` is resid_post.")]
Sites = Annotated[
    list[str] | None,
    typer.Option("--hook-site", "--sites", help="Further sites by name: `L12_resid_post`."),
]
Position = Annotated[
    str,
    typer.Option(
        help="Which tokens of a row: `last_prompt`, `first`, `all_prompt` (one activation per "
        "token), `mean_prompt` (the mean over them), or `index:0,-1` (chosen ones, in this order; "
        "negative from the end)."
    ),
]
Layout = Annotated[
    Literal["auto", "stacked", "per_site"],
    typer.Option(
        "--shard-layout",
        help="One array of all sites, or one file per site; `auto` stacks sites of one width.",
    ),
]
Format = Annotated[
    Literal["npy", "arrow"],
    typer.Option("--shard-format", help="What features files are; both are memory-mapped."),
]
_StorageDtype: TypeAlias = Literal["float32", "native", "float16"]


def _storage_dtype(text: str) -> str:
    if text == "bfloat16":
        raise typer.BadParameter(
            "'bfloat16' is not asked for by name; ask for `native`, the engine's own dtype"
        )
    if text not in get_args(_StorageDtype):
        raise typer.BadParameter(f"{text!a} is not one of {', '.join(get_args(_StorageDtype))}.")
    return text


Dtype = Annotated[
    _StorageDtype,
    typer.Option(
        "--storage-dtype",
        parser=_storage_dtype,
        metavar="<float32|native|float16>",
        help="How features are stored: `native` is the engine's own dtype, bfloat16 as its 16 "
        "bits; `float16` rounds, and fails rows with a value that does not fit.",
    ),
]
Mixed = Annotated[
    bool,
    typer.Option(
        "--mixed-fingerprints",
        help="Let shards come from engines that may differ numerically; recorded for each shard.",
    ),
]
FullTrace = Annotated[
    bool,
    typer.Option(
        "--full-trace", help="Keep every offered site at every token of good rows as well."
    ),
]
BatchSize = Annotated[str, typer.Option(help="Rows per request, or `auto`.")]
RowsPerShard = Annotated[
    int | None, typer.Option(min=1, max=1_048_576, help="Upper bound of a shard.")
]
DatasetId = Annotated[
    str | None, typer.Option(help="Default: made from what is asked, so it is found again.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")]
Resume = Annotated[bool, typer.Option("--resume/--no-resume", help="Go on with what is there.")]


def selection_of(
    served: Served,
    *,
    layers: list[str] | None,
    site: str,
    sites: list[str] | None,
    position: str,
) -> Selection:
    """What the options ask of every row.

    Raises:
        InvalidInputError: A layer, site or position that cannot be.
        NotOfferedError: A site or position that is not captured here.
    """
    from wllm_ray.requests import select

    numbers, names = _layers(layers, served.num_layers), _split(sites)
    if not numbers and not names:
        raise InvalidInputError(
            "no hook site asked for; give --layer (`--layer 12`, `--layer all`) or --hook-site "
            "(`--hook-site L12_resid_post`)",
            code="invalid_site",
        )
    return select(served, layers=numbers, site=site, sites=names, position=position)


def batch_size_of(text: str) -> int | Literal["auto"]:
    """What `--batch-size` says.

    Raises:
        InvalidInputError: Neither a number in range nor `auto`.
    """
    if text == "auto":
        return "auto"
    if text.isascii() and text.isdigit() and 1 <= int(text) <= 4096:  # noqa: PLR2004 (as in HTTP)
        return int(text)
    raise InvalidInputError(
        f"--batch-size takes 1 to 4096, or `auto`; found {text!a}", code="invalid_argument"
    )


def _split(values: list[str] | None) -> list[str]:
    return [part.strip() for value in values or () for part in value.split(",") if part.strip()]


def _layers(values: list[str] | None, num_layers: int) -> list[int]:
    parts = _split(values)
    if parts == ["all"]:
        return list(range(num_layers))
    for part in parts:
        if not (part.isascii() and part.isdigit()):
            raise InvalidInputError(
                f"--layer takes zero-based block numbers, or `all` alone; found {part!a}",
                code="invalid_argument",
            )
    return [int(part) for part in parts]
