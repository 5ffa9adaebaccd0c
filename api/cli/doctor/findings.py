"""Defines what a check of `graftwork doctor` has found, and the error with which a check says that something is amiss."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    """It works, and something should be known or changed."""
    WRONG = "wrong"
    """A server or client with these settings would not work."""

    @property
    def colour(self) -> str:
        return {State.OK: "green", State.WARNING: "yellow", State.WRONG: "red"}[self]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check has found."""

    name: str
    """What was checked, such as `disk`."""
    state: State
    text: str
    advice: str = ""
    """What to do about it; empty if nothing needs to be done."""

    def body(self) -> dict[str, Any]:
        return {"name": self.name, "state": str(self.state), "text": self.text, "advice": self.advice or None}


class Amiss(Exception):
    """A check that did not end well."""

    def __init__(self, text: str, advice: str, state: State = State.WRONG) -> None:
        super().__init__(text)
        self.text = text
        self.advice = advice
        self.state = state


@dataclass(frozen=True, slots=True)
class Check:
    """One check: a name and a function that returns what it found, or raises Amiss."""

    name: str
    run: Callable[[], str]


def warning(text: str, advice: str) -> Amiss:
    """Returns the exception for what works but should be known."""
    return Amiss(text, advice, State.WARNING)


def line(finding: Finding) -> str:
    """Returns a finding as one or two lines of text."""
    text = f"{finding.state.ljust(8)} {finding.name.ljust(10)} {finding.text}"
    return f"{text}\n{' ' * 20}→ {finding.advice}" if finding.advice else text
