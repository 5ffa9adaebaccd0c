"""Defines `graftwork completion`, which prints the script by which a shell completes commands and options."""

from typing import Annotated, Literal

import typer

COMPLETE_VARIABLE = "_GRAFTWORK_COMPLETE"
"""The variable with which the script of a shell asks this program for completions."""


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="Your shell.")]) -> None:
    """Print the script that makes a shell complete `graftwork`: its commands and options.

    bash: eval "$(graftwork completion bash)" in ~/.bashrc
    zsh: eval "$(graftwork completion zsh)" in ~/.zshrc, after compinit
    fish: graftwork completion fish > ~/.config/fish/completions/graftwork.fish

    Example: graftwork completion bash
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # Typer re-exports it

    typer.echo(get_completion_script(prog_name="graftwork", complete_var=COMPLETE_VARIABLE, shell=shell))
