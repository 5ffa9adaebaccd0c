"""Runs the checks of `graftwork doctor`, each for itself: a check that fails ends no other.

Owns the order of the checks. Never changes anything that it looks at, apart from a file that it writes and removes.
"""

from collections.abc import Callable, Iterable
from functools import partial

from graftwork.api.cli.doctor import machine, services
from graftwork.api.cli.doctor.findings import Amiss, Check, Finding, State
from graftwork.api.sdk.transport.errors import GraftworkError as ClientError
from graftwork.platform.errors import GraftworkError
from graftwork.platform.settings.settings import Settings


def all_checks(settings: Settings) -> list[Check]:
    """Returns the checks for the settings, the cheapest first."""
    checks: dict[str, Callable[[], str]] = {
        "python": machine.check_python,
        "libraries": machine.check_libraries,
        "clock": machine.check_clock,
        "device": partial(machine.check_device, settings),
        "kernels": partial(machine.check_kernels, settings),
        "model": partial(machine.check_model, settings),
        "data": partial(machine.check_data_folder, settings),
        "disk": partial(machine.check_disk, settings),
        "port": partial(services.check_port, settings),
        "database": partial(services.check_database, settings),
        "redis": partial(services.check_redis, settings),
        "server": services.check_server,
    }
    return [Check(name, run) for name, run in checks.items()]


def examine(checks: Iterable[Check]) -> list[Finding]:
    """Runs all checks, and returns what they found in their order."""
    return [_run(check) for check in checks]


def _run(check: Check) -> Finding:
    try:
        return Finding(check.name, State.OK, check.run())
    except Amiss as amiss:
        return Finding(check.name, amiss.state, amiss.text, amiss.advice)
    except (GraftworkError, ClientError) as error:
        return Finding(check.name, State.WRONG, " ".join(error.message.split()), "Do what the message says.")
    except ModuleNotFoundError as error:
        advice = "This is a client alone; to serve, pip install 'graftwork[server]'."
        return Finding(check.name, State.WARNING, f"not checked: there is no module {error.name} here", advice)
    except OSError as error:
        return Finding(check.name, State.WRONG, str(error), "See that this user may read and write there.")
