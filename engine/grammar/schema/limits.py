"""The limits on the size of a grammar, and on the cost of a compile.

The lint checks the first group, in microseconds. The compiler enforces the second group on each compile.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LintLimits:
    """The limits on a grammar's text. A request over a limit gets a 400 that names the place."""

    text_bytes: int = 256 * 1024
    depth: int = 64
    """The nesting depth of a schema's JSON."""
    enum_values: int = 4096
    """The number of enum values of the whole document."""
    properties: int = 5000
    """The number of properties of the whole document."""
    optional_properties: int = 512
    """Optional properties of one object."""
    union_width: int = 256
    """The number of alternatives of one `anyOf` or `oneOf`."""
    pattern_length: int = 1024
    pattern_repeats: int = 4096
    """The largest product of a pattern's nested counted repeats: `(a{3}){4}` has 12 copies of `a`."""
    length_bound: int = 1 << 20
    """The largest value of `minLength`, `maxLength`, `maxItems` and `maxProperties`."""
    lower_count: int = 1024
    """The largest `minItems` and `minProperties`, because each required item becomes a separate rule."""
    branches: int = 512
    """Branches (alternatives) of one subschema, after unions, conditions and negations are expanded."""
    nodes: int = 20_000
    """Alternatives with one type in the whole grammar, after expansion (core_schema.TypedSchema)."""
    tags: int = 256


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """The limits on one compile, on one domain and on the cache."""

    seconds: float = 4.0
    """Seconds of processor time after which the compiling process is killed."""
    wall_seconds: float = 12.0
    """Seconds of wall time after which it is killed in any case, because a request waits for the answer."""
    niceness: int = 19
    """The niceness of the compiling processes, so that serving goes first."""
    memory_bytes: int = 1024 * 2**20
    """Bytes that a compile may use, besides what the compile server itself maps."""
    cache_bytes: int = 64 * 2**20
    """Bytes of the cached results of all domains; those of public grammars come on top."""
    cache_entries: int = 512
    """The number of cached results. Refusals count too, so that a hostile grammar is not compiled again."""
    domain_cache_bytes: int = 16 * 2**20
    """Bytes of the cached results of one domain, and of public grammars. One result may be larger."""
    domain_cache_entries: int = 128
    domain_seconds_per_minute: float = 15.0
    """Seconds of compiling for one domain in a minute. Over it, the domain's new grammars get a 429 for a while."""
    domain_queue: int = 32
    """The number of grammars of one domain that may wait for a compile."""
    fill_seconds: float = 0.25
    """Seconds of processor time for one mask. A slower mask ends its request, because it would delay the whole step."""
