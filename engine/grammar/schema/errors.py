"""Defines the error for a grammar that cannot be enforced, and collects the keywords that are not enforced.

The error names the place in the grammar and the reason. A caller that is not strict gets the list of these keywords
instead.
"""

from dataclasses import dataclass, field

from graftwork.platform.errors import InvalidRequest

UNSUPPORTED = "unsupported_grammar"


def refused(pointer: str, reason: str) -> InvalidRequest:
    """Returns the error that says why a place in a grammar is refused.

    `pointer` names the place, as a URI fragment: `#` is the whole grammar, `#/properties/a/not` a part of a schema.
    """
    return InvalidRequest(f"The grammar cannot be enforced at {pointer}: {reason}", param=pointer, code=UNSUPPORTED)


@dataclass(slots=True)
class UnenforcedKeywords:
    """Collects the keywords of a grammar that cannot be enforced.

    If the grammar is strict, the first such keyword raises InvalidRequest.
    """

    strict: bool
    pointers: dict[str, str] = field(default_factory=dict)
    """The reason for each keyword, by its JSON pointer."""

    def record(self, pointer: str, reason: str) -> None:
        """Records a keyword that cannot be enforced, and the reason.

        Raises InvalidRequest if the grammar is strict.
        """
        if self.strict:
            raise refused(pointer, reason)
        self.pointers.setdefault(pointer, reason)

    def listed(self) -> tuple[tuple[str, str], ...]:
        """Returns all keywords that are not enforced as pairs (pointer, reason), sorted by pointer."""
        return tuple(sorted(self.pointers.items()))
