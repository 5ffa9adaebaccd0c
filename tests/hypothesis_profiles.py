"""How Hypothesis draws examples: the same ones on every run, or many new ones in the slow suite.

The fast suite runs the profile `repeatable`. Its examples depend on the source of the test alone, so a run fails for
a change in the code and never by chance. `make test-slow` runs the profile `search`, which draws new examples on every
run and ten times as many; a failure prints a `@reproduce_failure` line that repeats it.
"""

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture.providers import HypothesisProvider, _get_local_constants
from hypothesis.internal.constants_ast import Constants

_EXAMPLES = 100
_SEARCH_FACTOR = 10


def examples(number: int, in_search: int | None = None) -> int:
    """The `max_examples` of a test: `number` in the fast suite, ten times as many or `in_search` in the slow one."""
    if not is_search():
        return number
    return number * _SEARCH_FACTOR if in_search is None else in_search


def is_search() -> bool:
    """Whether this run draws new examples."""
    return not settings().derandomize


def register_profiles() -> None:
    """Make both profiles known and load `repeatable`; `--hypothesis-profile=search` loads the other one later.

    Neither has deadlines: how long an example takes depends on the machine.
    """
    settings.register_profile(
        "repeatable",
        max_examples=_EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.register_profile(
        "search",
        max_examples=_EXAMPLES * _SEARCH_FACTOR,
        derandomize=False,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("repeatable")
    _draw_no_constants_of_loaded_modules()


def _draw_no_constants_of_loaded_modules() -> None:
    """Make the examples of `repeatable` independent of the modules that earlier tests happened to import.

    Hypothesis also draws constants that it finds in the source of every imported local module, and has no setting
    that turns this off.
    """
    HypothesisProvider._local_constants = property(  # type: ignore[assignment]
        lambda provider: _get_local_constants() if is_search() else Constants()
    )
