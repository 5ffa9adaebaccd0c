"""The header that names what of a request's schemas is not enforced.

    x-graftwork-unenforced: tools[0].function.parameters#/properties/id/format, +3 more

Each place is a field of the body and a JSON pointer into the schema that stands there; bounded, so that every client
and proxy takes the header.
"""

from collections.abc import Callable, Mapping, Sequence
from urllib.parse import quote

UNENFORCED = "x-graftwork-unenforced"
_MOST_CHARACTERS = 2000
_READABLE = "/#[]$~:@!*+=-._"


def unenforced_header(places: Sequence[str], rename: Callable[[str], str] = str) -> Mapping[str, str]:
    """Nothing where everything is enforced. `rename` names fields as the route's clients do."""
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
