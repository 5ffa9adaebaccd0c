"""Defines which values of the JSON Schema keyword `format` are enforced, and how.

Most formats are enforced by patterns in this file. Where no pattern can express the standard, the pattern allows less:
no leap seconds, no punycode. llguidance enforces the other formats. It accepts no value that the JSON Schema test suite
calls invalid.
"""

from graftwork.engine.grammar.patterns.reader import read_whole
from graftwork.engine.grammar.schema.constraints import Bound, Demand, HasFormat, Length, Matches
from graftwork.engine.grammar.schema.json_values import STRING

_BUILT_IN = frozenset({"duration", "email", "ipv4", "ipv6", "uuid", "uri"})

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+\-]{_CLOCK})"
_END = "[A-Za-z0-9]"
_INNER = "[A-Za-z0-9\\-]"
_LABEL = f"{_END}(?:{_INNER}?{_END}|{_INNER}(?:{_END}{_INNER}|-{_END}){_INNER}{{0,58}}{_END}|{_INNER}{_INNER}{_END})?"
"""A pattern of one label of a host name. Hyphens as both third and fourth character mark punycode, so they are
excluded.
"""
_POINTER = "(?:/(?:[^~/]|~[01])*)*"

_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
}
_BOUNDS = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
}
_WITHOUT_EFFECT = frozenset({"float", "double"})


def demands_of(name: object, pointer: str) -> tuple[Demand, ...] | None:
    """Returns what a value of the JSON Schema keyword `format` demands of a string or number.

    The result is empty if the format allows every value, and None if the format cannot be enforced. `pointer` is the
    JSON pointer of the keyword.
    """
    if not isinstance(name, str):
        return None
    if name in _BUILT_IN:
        return (HasFormat(name, pointer),)
    if name in _PATTERNS:
        longest = (Length(STRING, 0, 253, pointer),) if name == "hostname" else ()
        return (Matches(read_whole(_PATTERNS[name]), pointer), *longest)
    if name in _BOUNDS:
        low, high = _BOUNDS[name]
        return (Bound(low, True, False, pointer), Bound(high, False, False, pointer))
    return () if name in _WITHOUT_EFFECT else None
