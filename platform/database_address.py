"""Reads the address of a database, and divides it between SQLAlchemy and the database driver.

Knows which databases are served, and which parameters of an address are honoured. A parameter that nothing would read
is refused. Opens no connection.
"""

from typing import Any
from urllib.parse import urlencode

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from graftwork.platform.errors import InvalidRequest

_DRIVERS = ("sqlite+aiosqlite", "postgresql+asyncpg")
_OWN_PARAMETERS = frozenset({"host", "port", "ssl", "prepared_statement_cache_size"})
"""Parameters of a PostgreSQL address that SQLAlchemy and asyncpg take as they are."""
_LIBPQ_PARAMETERS = frozenset(
    {
        *("sslmode", "sslrootcert", "sslcert", "sslkey", "sslpassword", "sslcrl", "sslnegotiation"),
        *("ssl_min_protocol_version", "ssl_max_protocol_version"),
        *("target_session_attrs", "passfile", "krbsrvname", "gsslib", "application_name", "options"),
    }
)
"""Parameters of libpq that asyncpg reads from an address of its own, as libpq does."""


def split_address(url: str) -> tuple[URL, dict[str, Any]]:
    """Divides a database address into the address for SQLAlchemy and the arguments for the database driver.

    The arguments contain the address's parameters for libpq (PostgreSQL's C library), which SQLAlchemy does not read.
    Raises InvalidRequest if the address has a wrong form, an unsupported database, or a parameter that nothing reads.
    """
    try:
        address = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise _wrong_address("it is no address") from error
    if address.drivername not in _DRIVERS:
        raise _wrong_address(f"{address.drivername} is not served")
    if address.drivername == "sqlite+aiosqlite":
        return address, {}
    arguments: dict[str, Any] = {}
    libpq = {name: value for name, value in address.query.items() if name in _LIBPQ_PARAMETERS}
    if libpq:
        arguments["dsn"] = f"postgresql://?{urlencode(libpq, doseq=True)}"
    timeout = address.query.get("connect_timeout")
    if timeout is not None:
        if not isinstance(timeout, str) or not timeout.isdecimal() or not int(timeout):
            raise _wrong_address(f"connect_timeout {timeout!r} is no number of seconds from 1 up")
        arguments["timeout"] = float(timeout)
    unknown = sorted(set(address.query) - _OWN_PARAMETERS - _LIBPQ_PARAMETERS - {"connect_timeout"})
    if unknown:
        raise _wrong_address(f"its parameter {unknown[0]!r} cannot be honoured; leave it out")
    return address.difference_update_query([*libpq, "connect_timeout"]), arguments


def _wrong_address(problem: str) -> InvalidRequest:
    return InvalidRequest(
        f"database_url: {problem}. Give postgresql://USER:PASSWORD@HOST/NAME or sqlite+aiosqlite:///PATH.",
        param="database_url",
    )
