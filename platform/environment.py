"""What this process and its children take from the environment besides settings.

Owns nothing: each function reads the environment anew.
"""

import os
from collections.abc import Mapping


def child_environment(defaults: Mapping[str, str], overrides: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment variables for a child process: all variables of this process, and those that are given.

    If a variable is in several, that of `overrides` is used, or else that of this process.
    """
    return {**defaults, **os.environ, **(overrides or {})}


def time_zone() -> dict[str, str]:
    """Returns the environment variable of the time zone, for a child process. Returns {} if it is not set."""
    return {"TZ": os.environ["TZ"]} if "TZ" in os.environ else {}


def wants_colours() -> bool:
    """Returns whether the user allows colours at a terminal: https://no-color.org."""
    return not os.environ.get("NO_COLOR")
