"""Defines `graftwork demo`, which runs the demo on the small model that comes with Graftwork."""

import typer

from graftwork.api.cli.console.failures import require_modules
from graftwork.api.cli.console.output import JsonFlag


def demo(as_json: JsonFlag = False) -> None:
    """Watch three tenants' agents share one small model: tools, a fork, a restart.

    Starts its own server on a free port with a temporary data folder, and takes about a minute.

    Example: graftwork demo
    """
    require_modules("fastapi", "torch")  # the server's process needs them
    from graftwork.api.cli.demo.story import tell_story

    if not tell_story(as_json):
        raise typer.Exit(1)
