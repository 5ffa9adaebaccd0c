"""Graftwork: one base model, many tenants' LoRA adapters, agent sessions that last.

The SDK's two clients are importable from here; importing them loads neither torch nor the server.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graftwork.api.sdk.client import AsyncGraftwork as AsyncGraftwork
    from graftwork.api.sdk.client import Graftwork as Graftwork

__version__ = "0.1.0"
__all__ = ["AsyncGraftwork", "Graftwork"]


def __getattr__(name: str) -> Any:
    """Load the SDK on first use, so that `import graftwork` stays free for the engine and the tools."""
    if name in __all__:
        return getattr(import_module("graftwork.api.sdk.client"), name)
    raise AttributeError(f"module 'graftwork' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the clients too, although they are not loaded yet."""
    return sorted({*globals(), *__all__})
