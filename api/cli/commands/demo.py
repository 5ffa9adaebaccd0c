"""Defines `graftwork demo`, which runs the demo on the small model that comes with Graftwork."""

import typer

from graftwork.api.cli.console.failures import require_modules
from graftwork.api.cli.console.output import JsonFlag


def demo(as_json: JsonFlag = False) -> None:
    """Watch the agents of three tenants share one small model: they call tools, fork a session, and survive a restart.

    The demo starts its own server on a free port with a temporary data folder, and takes about a minute.

    Example: graftwork demo
    """
    require_modules("fastapi", "torch")  # the server's process needs them
    from graftwork.api.cli.demo.story import tell_story

    if not tell_story(as_json):
        raise typer.Exit(1)
