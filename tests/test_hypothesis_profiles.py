"""Tests of the profiles of Hypothesis."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

PROGRAM = """
import sys
from hypothesis import given, settings, strategies as st
from tests.hypothesis_profiles import examples, register_profiles
register_profiles()
settings.load_profile(sys.argv[1])
if len(sys.argv) > 2:
    sys.path.append(sys.argv[2])
    import loaded_before

@settings(max_examples=examples(30))
@given(numbers=st.lists(st.integers(), min_size=10))
def show(numbers):
    print(numbers)

show()
"""


def drawn(profile: str, *arguments: str) -> list[str]:
    """The examples that a fresh interpreter draws for one property."""
    command = [sys.executable, "-c", PROGRAM, profile, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_repeatable_examples_do_not_depend_on_loaded_modules(tmp_path: Path) -> None:
    """Two processes draw the same examples, also if one has imported another module of the project."""
    numbers = [10**9 + step * 7919 for step in range(200)]
    (tmp_path / "loaded_before.py").write_text(f"NUMBERS = {numbers}\n")

    alone, with_module = drawn("repeatable"), drawn("repeatable", str(tmp_path))

    assert alone == with_module
    assert len(alone) == 30


def test_a_search_draws_new_examples_and_more_of_them() -> None:
    """Two searches draw different examples, ten times as many as the fast suite."""
    first, second = drawn("search"), drawn("search")

    assert first != second
    assert len(first) == len(second) == 300
