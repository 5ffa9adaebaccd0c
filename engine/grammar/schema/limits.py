"""How large a grammar may be before anything is compiled, and what it may cost while it is.

The first group is checked by the lint, in microseconds; the second is kept by the compiler around each compile.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LintLimits:
    """What a grammar's text may hold. Beyond it the request is a 400 that names the place."""

    text_bytes: int = 256 * 1024
    depth: int = 64
    """Objects and lists around each other in a schema's JSON."""
    enum_values: int = 4096
    """Over the whole document."""
    properties: int = 5000
    """Over the whole document."""
    optional_properties: int = 512
    """Of one object."""
    union_width: int = 256
    """Alternatives of one `anyOf` or `oneOf`."""
    pattern_length: int = 1024
    pattern_repeats: int = 4096
    """Copies of its inmost part that a pattern's counted repeats ask for."""
    length_bound: int = 1 << 20
    """`minLength`, `maxLength`, `maxItems`, `maxProperties`."""
    lower_count: int = 1024
    """`minItems`, `minProperties`: each one asked for is a rule of its own."""
    branches: int = 512
    """Alternatives of one place, once unions, conditions and negations are multiplied out."""
    nodes: int = 20_000
    """Typed places of the whole grammar, once multiplied out."""
    tags: int = 256


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """What one compile, one domain and the cache may cost."""

    seconds: float = 4.0
    """Of processor time, after which the compiling process is killed."""
    wall_seconds: float = 12.0
    """After which it is killed in any case: on a machine that leaves it no processor, somebody waits for the answer."""
    niceness: int = 19
    """Of the processes that compile: what is served goes before them."""
    memory_bytes: int = 1024 * 2**20
    """On top of what the nursery itself maps."""
    cache_bytes: int = 64 * 2**20
    cache_entries: int = 512
    """Refusals included: a hostile grammar is refused again without being compiled again."""
    domain_seconds_per_minute: float = 15.0
    """Of compiling, for one domain; over it its next grammars are a 429 until the minute has passed."""
    domain_queue: int = 32
    """Grammars of one domain that may wait to be compiled."""
    fill_seconds: float = 0.25
    """Of processor time. One mask that takes longer ends its request: it would hold up everybody's step."""
