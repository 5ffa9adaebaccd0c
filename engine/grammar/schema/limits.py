"""Defines the limits on the size of a grammar, and on the cost of a compile.

LintLimits are checked before a compile, in the grammar's text. CompileLimits are enforced while grammars are compiled
and used.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LintLimits:
    """The limits on a grammar's text.

    A grammar that exceeds a limit is refused with HTTP status 400. The error names the place in the grammar.
    """

    text_bytes: int = 256 * 1024
    depth: int = 64
    """The largest nesting depth of a schema's JSON."""
    enum_values: int = 4096
    """The most enum values of the whole document."""
    properties: int = 5000
    """The most properties of the whole document."""
    optional_properties: int = 512
    """The most optional properties of one object."""
    union_width: int = 256
    """The most alternatives of one `anyOf` or `oneOf`."""
    pattern_length: int = 1024
    pattern_repeats: int = 4096
    """The largest product of a pattern's nested counted repeats: `(a{3}){4}` has 12 copies of `a`."""
    length_bound: int = 1 << 20
    """The largest value of `minLength`, `maxLength`, `maxItems` and `maxProperties`."""
    lower_count: int = 1024
    """The largest `minItems` and `minProperties`, because each required item becomes a separate rule."""
    alternatives: int = 512
    """The most alternatives of one subschema, after unions, conditions and negations are expanded."""
    nodes: int = 20_000
    """The most typed schemas (core_schema.TypedSchema) of the whole grammar, after expansion."""
    tags: int = 256


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """The limits on compiled grammars: on one compile, on the compiles of one isolation domain (group of callers), on
    the cache of results, and on the time to fill one mask.
    """

    seconds: float = 4.0
    """Seconds of processor time after which the compiling process is killed."""
    wall_seconds: float = 12.0
    """Seconds of wall time after which the compiling process is killed in any case, because a request waits for its
    answer.
    """
    niceness: int = 19
    """The niceness of the compiling processes. A high niceness lets serving go first."""
    memory_bytes: int = 1024 * 2**20
    """The most bytes of memory for one compile, in addition to the memory that the compile server itself has mapped."""
    cache_bytes: int = 64 * 2**20
    """Bytes of the cached results of all isolation domains (groups of callers). Public grammars are not counted."""
    cache_entries: int = 512
    """The most cached results. Refusals count too, so that a hostile grammar is not compiled again."""
    domain_cache_bytes: int = 16 * 2**20
    """Bytes of the cached results of one isolation domain, and of public grammars. A single result may be larger."""
    domain_cache_entries: int = 128
    """The most cached results of one isolation domain, and of public grammars."""
    domain_seconds_per_minute: float = 15.0
    """The most seconds of compiling in a minute for one isolation domain. Above this, new grammars of the domain are
    refused with HTTP status 429, until the domain has got some seconds back.
    """
    domain_queue: int = 32
    """The most grammars of one isolation domain that may wait for a compile."""
    fill_seconds: float = 0.25
    """The most seconds of processor time for one mask. A slower mask ends its request, because it would delay the whole
    step.
    """
