"""Builds the header that names the parts of a request's schemas that the server does not enforce.

    x-graftwork-unenforced: tools[0].function.parameters#/properties/id/format, +3 more

Each entry is a field of the body and a JSON pointer into its schema. The header is at most 2000 characters long, so
that every client and proxy accepts it.
"""

from collections.abc import Callable, Mapping, Sequence
from urllib.parse import quote

UNENFORCED = "x-graftwork-unenforced"
_MOST_CHARACTERS = 2000
_READABLE = "/#[]$~:@!*+=-._"


def unenforced_header(places: Sequence[str], rename: Callable[[str], str] = str) -> Mapping[str, str]:
    """Return the header that lists `places`, or no header if there are none.

    `rename` converts the fields' names to the names of the route's API.
    """
    shown: list[str] = []
    length = 0
    for place in places:
        shown.append(quote(rename(place), safe=_READABLE))
        length += len(shown[-1]) + 2
        if length > _MOST_CHARACTERS:
            shown.pop()
            break
    left_out = len(places) - len(shown)
    return {UNENFORCED: ", ".join([*shown, f"+{left_out} more"] if left_out else shown)} if places else {}
