"""Defines `graftwork doctor`, which looks for what keeps a server or a client from working, and says how to fix it."""

import typer

from graftwork.api.cli.console.output import JsonFlag, show_json


def doctor(as_json: JsonFlag = False) -> None:
    """Check this machine: libraries, device, kernels, model, data folder, disk, ports, database, Redis, server and clock.

    Checks the settings that `serve` would have here, from the environment and graftwork.toml. Exits with status 1 if
    something is wrong; a warning alone is no failure.

    Example: graftwork doctor
    """
    from graftwork.api.cli.doctor.examine import all_checks, examine
    from graftwork.api.cli.doctor.findings import State, line
    from graftwork.platform.settings.settings import Settings

    findings = examine(all_checks(Settings.from_environment()))
    is_wrong = any(finding.state is State.WRONG for finding in findings)
    if as_json:
        show_json({"findings": [finding.body() for finding in findings], "healthy": not is_wrong})
    else:
        for finding in findings:
            typer.secho(line(finding), fg=finding.state.colour)
    if is_wrong:
        raise typer.Exit(1)
