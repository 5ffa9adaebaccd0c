"""The gateway's socket, bound before anything slow begins: a port that is taken is known at once."""

import socket

from graftwork.platform.errors import Conflict

_BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A socket ready to listen; port 0 takes a free one. Raises Conflict if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise Conflict(f"{host}:{port} cannot be listened on ({error.strerror}): choose another --port.") from error


def url_of(bound: socket.socket) -> str:
    """How a client on this machine, or one that knows this host by that name, reaches it."""
    host, port = bound.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"
