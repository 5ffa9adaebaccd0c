"""Turns every expected error of a command into one line that says what to do, and ends the program with an exit status:
1, or 75 if the program only has to be started again.

Never hides a bug: an unexpected exception still prints its traceback.
"""

import logging
import os
from importlib.util import find_spec
from typing import Any

import typer
from typer.core import TyperGroup

from graftwork.api.sdk.transport import errors as sdk_errors
from graftwork.platform import errors as platform_errors

_log = logging.getLogger(__name__)

_VALUE_ERRORS = (
    sdk_errors.BadRequestError,
    sdk_errors.ValidationError,
    platform_errors.InvalidRequest,
    platform_errors.ValidationFailed,
)
"""Errors whose `param` names the wrong value. In other errors, `param` names only a part of the URL's path."""

_NEEDS_SERVER = "This command needs the server: pip install 'graftwork[server]'"


class CommandGroup(TyperGroup):
    """The group of all commands of the program.

    If a command raises an expected error, prints one line, and exits with status 1, or with the status of the error.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (sdk_errors.GraftworkError, platform_errors.GraftworkError) as error:
            _log.debug("command_failed", exc_info=True)
            typer.echo(f"Error: {advice(error)}", err=True)
            if isinstance(error, platform_errors.GraftworkError):
                raise typer.Exit(error.exit_status) from error
        except OSError as error:
            typer.echo(f"Error: {error}", err=True)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] == "graftwork":
                raise  # a missing module of our own is a bug
            typer.echo(f"Error: {_NEEDS_SERVER} (there is no module {error.name} here).", err=True)
        raise typer.Exit(1)


def require_modules(*names: str) -> None:
    """Checks that these Python packages are installed, without importing them.

    Raises ModuleNotFoundError for the first package that is not installed.
    """
    for name in names:
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def advice(error: sdk_errors.GraftworkError | platform_errors.GraftworkError) -> str:
    """Returns one line of text for an error: what is wrong, and what the user can do about it."""
    message = " ".join(error.message.split())
    if isinstance(error, _VALUE_ERRORS) and error.param and error.param not in message:
        message = f"{error.param}: {message}"
    match error:
        case sdk_errors.APIConnectionError(code="unreachable"):
            return f"{message}: start one with `graftwork serve --demo`, or set GRAFTWORK_URL."
        case sdk_errors.AuthenticationError():
            return f"{message} (Keys are read from GRAFTWORK_API_KEY, and from GRAFTWORK_ADMIN_KEY by admin commands.)"
        case sdk_errors.PermissionDeniedError(code="not_tenant_admin") if os.environ.get("GRAFTWORK_API_KEY"):
            return f"{message} (GRAFTWORK_API_KEY, or api_key in graftwork.toml, goes before a sign-in: take it out.)"
        case sdk_errors.ServerError(request_id=str(request_id)):
            return f"{message} (The server's log has more under {request_id}.)"
    return message
