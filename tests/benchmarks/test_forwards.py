"""Tests of the search for functions that only pass a call on."""

import ast

import pytest
from benchmarks.forwards import is_forward, longest_chain


def function(source: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return node


@pytest.mark.parametrize(
    "source",
    [
        "def f(a, b): return g(a, b)",
        "async def f(self, a): await self._other.f(a)",
        'def f(self, a):\n    """Says why."""\n    return self._other.f(a, key=a)',
        "def f(*values, **named): return g(*values, **named)",
        "def f(self): yield from self._rows()",
        "def f(self): self._other.close()",
    ],
)
def test_a_body_that_only_passes_its_parameters_on_is_a_forward(source: str) -> None:
    """A body that only passes its parameters on is a forward, with or without a docstring."""
    assert is_forward(function(source))


@pytest.mark.parametrize(
    "source",
    [
        "def f(a): return g(a, 1)",
        "def f(self, a): return g(self._b, a)",
        "def f(a): return g(a + 1)",
        "def f(a): return g(h(a))",
        "def f(a): return g(a).b",
        "def f(a): return Thing(a)",
        "def f(a):\n    g(a)\n    return a",
        "def f(a): pass",
    ],
)
def test_a_body_that_adds_something_is_no_forward(source: str) -> None:
    """A body with a constant, a field, a computation, a second statement or a new object is no forward."""
    assert not is_forward(function(source))


def test_a_chain_follows_calls_from_forward_to_forward() -> None:
    """A chain of forwards ends at a function that is no forward or calls none of ours."""
    calls = {0: [1], 1: [2], 2: [3], 3: [4], 5: []}

    assert longest_chain({0, 1, 3, 5}, calls) == [0, 1]
    assert longest_chain({5}, calls) == []


def test_a_chain_that_comes_back_to_itself_ends() -> None:
    """A forward that calls itself through another forward is counted once."""
    assert longest_chain({0, 1}, {0: [1], 1: [0]}) in ([0, 1], [1, 0])
