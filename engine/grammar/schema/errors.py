"""What is not served, and where: the one error of this room, and the list of what was let go instead."""

from dataclasses import dataclass, field

from graftwork.platform.errors import InvalidRequest

UNSUPPORTED = "unsupported_grammar"


def refused(pointer: str, reason: str) -> InvalidRequest:
    """`pointer` is a URI fragment: `#` for the whole, `#/properties/a/not` for a part."""
    return InvalidRequest(f"The grammar cannot be enforced at {pointer}: {reason}", param=pointer, code=UNSUPPORTED)


@dataclass(slots=True)
class Gaps:
    """What cannot be enforced: the end of a strict grammar, and a list for one that is not strict."""

    strict: bool
    pointers: dict[str, str] = field(default_factory=dict)
    """What was let go, and why."""

    def meet(self, pointer: str, reason: str) -> None:
        """Returns only where the caller may go on without. Raises InvalidRequest under `strict`."""
        if self.strict:
            raise refused(pointer, reason)
        self.pointers.setdefault(pointer, reason)

    def listed(self) -> tuple[tuple[str, str], ...]:
        """By pointer."""
        return tuple(sorted(self.pointers.items()))
