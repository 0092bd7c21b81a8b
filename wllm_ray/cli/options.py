"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["LOCAL_APPLICATION", "LOCAL_DASHBOARD", "AsJson", "BaseUrl"]

LOCAL_APPLICATION = "http://127.0.0.1:8000"
LOCAL_DASHBOARD = "http://127.0.0.1:8265"

AsJson = Annotated[bool, typer.Option("--json", help="One JSON line instead of text.")]
BaseUrl = Annotated[str, typer.Option(help="Where the application listens.")]
