"""What the scheduler asks of adapters; LoraPool answers it."""

from typing import Protocol

from graftwork.engine.request import AdapterUse
from graftwork.platform.errors import GraftworkError


class AdapterResidency(Protocol):
    """Whether an adapter's weights are on the device; pins keep them there."""

    def want(self, groups: list[tuple[str, ...]]) -> None:
        """What each waiting request needs, in their order: loads are begun, room is made and given out."""
        ...

    def is_ready(self, digest: str) -> bool:
        """Whether a request may start with it now."""
        ...

    def refusal(self, uses: tuple[AdapterUse, ...]) -> GraftworkError | None:
        """Why adapters cannot serve one request together, as far as they are known by now."""
        ...

    def pin(self, digest: str) -> None: ...

    def unpin(self, digest: str) -> None: ...
