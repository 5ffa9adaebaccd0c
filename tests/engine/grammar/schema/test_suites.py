"""Tests of the public suites: no invalid value is accepted, and each refusal has a pointer."""

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from benchmarks.suite_cases import Judge, SchemaCase, Verdict, bench_cases, suite_cases

from graftwork.platform.errors import InvalidRequest


def overs(judge: Judge, cases: list[SchemaCase]) -> tuple[list[str], Counter[Verdict]]:
    """Returns the cases that wrongly accept a value, and all verdicts."""
    verdicts = {case.name: judge.verdicts(case) for case in cases}
    wrong = [name for name, found in verdicts.items() if Verdict.OVER in found]
    return wrong, Counter(verdict for found in verdicts.values() for verdict in found)


def test_the_test_suite_has_no_over_accepts(judge: Judge, data: Path) -> None:
    """Of the 1,299 cases of draft 2020-12 none is accepted wrongly, and more are right than with either engine
    alone."""
    wrong, counts = overs(judge, list(suite_cases(data)))

    assert wrong == []
    assert counts.total() == 1299
    assert counts[Verdict.CORRECT] >= 980  # xgrammar 0.2.8 alone: 877, with 299 over-accepts; llguidance 1.9.1: 574


@pytest.mark.parametrize("part", ["optional", "optional/format"])
def test_the_optional_suites_have_no_over_accepts(judge: Judge, data: Path, part: str) -> None:
    """An enforced format accepts nothing that the optional suites call invalid."""
    wrong, counts = overs(judge, list(suite_cases(data, part)))

    assert wrong == []
    assert counts[Verdict.CORRECT] > counts.total() / 2


def test_part_of_the_bench_has_no_over_accepts(judge: Judge, data: Path) -> None:
    """Every fifth schema of the JSONSchemaBench sample accepts no invalid instance."""
    wrong, counts = overs(judge, list(islice(bench_cases(data), 0, None, 5)))

    assert wrong == []
    assert counts[Verdict.CORRECT] > 0.9 * counts.total()


@pytest.mark.slow
def test_the_bench_has_no_over_accepts(judge: Judge, data: Path) -> None:
    """None of the 1,505 instances of the JSONSchemaBench sample is accepted wrongly."""
    wrong, counts = overs(judge, list(bench_cases(data)))

    assert wrong == []
    assert counts[Verdict.CORRECT] >= 1400


def test_every_refusal_has_a_pointer(judge: Judge, data: Path) -> None:
    """Each refusal's param is a pointer from the root, and the message has it too."""
    refusals = []
    for case in suite_cases(data):
        try:
            judge.ours(case.schema)
        except InvalidRequest as error:
            refusals.append(error)

    assert len(refusals) > 50
    assert all(refusal.status == 400 and (refusal.param or "").startswith("#") for refusal in refusals)
