"""Says whether the ledger agrees with what the engines have reported, and with its own sums.

Each request of the time is judged by itself, with the reports of all engines that worked on it:

    agrees        billed and unbilled tokens are what was reported, and so are memory and time, to the last token
    again         several engines worked on one answer, after a failure or because one was late: at most so much is billed
    interrupted   the gateway died: at most what was reported is billed
    nothing       no engine began, and nothing is billed
    more          more is billed than was reported                                     ─┐
    less          less is billed and unbilled than was reported                         ├ differences
    unreported    something is billed, and no engine reported anything                  │
    unbilled      an engine has reported a request that the ledger does not have        ─┘
    dropped       the same, for a line of a batch: it is done again, or was not wanted any more
    own           the same, for a request of the server itself: it asks engines whether they are ready
    pending       the same, and so young that it may still run

Owns these rules and the verdict. Never changes a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.ledger.report_rows import sum_usage
from graftwork.platform.ledger.upkeep import agreement_rows
from graftwork.platform.ledger.usage import UsageGroup, UsageSummary

SETTLED_S = 600.0
"""Reports that are younger may be of requests that still run."""


class Verdict(StrEnum):
    """How a request's row compares with the engines' reports, as at the top of this module."""

    AGREES = "agrees"
    AGAIN = "again"
    INTERRUPTED = "interrupted"
    NOTHING = "nothing"
    MORE = "more"
    LESS = "less"
    UNREPORTED = "unreported"
    UNBILLED = "unbilled"
    DROPPED = "dropped"
    OWN = "own"
    PENDING = "pending"

    @property
    def is_difference(self) -> bool:
        return self in (Verdict.MORE, Verdict.LESS, Verdict.UNREPORTED, Verdict.UNBILLED)


@dataclass(frozen=True, slots=True)
class Compared:
    """All requests with one verdict: what the ledger bills, what it knows and does not bill, and what engines reported."""

    verdict: Verdict
    requests: int
    billed: Mapping[str, int]
    """By field, such as `prompt_tokens`. So are the next two."""
    unbilled: Mapping[str, int]
    reported: Mapping[str, int]
    examples: tuple[str, ...] = ()
    """Up to ten requests, of a difference."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """The result of one comparison."""

    start: float
    end: float
    compared: tuple[Compared, ...]
    sums: Mapping[str, tuple[int, int]]
    """Fields in which the sums and the rows differ, with both values."""

    @property
    def differences(self) -> int:
        """Requests that differ, and fields in which the sums do."""
        return sum(one.requests for one in self.compared if one.verdict.is_difference) + len(self.sums)


class AgreementCheck:
    """Compares the ledger with the reports of engines, in one database."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def compare(self, start: float, end: float, settled_s: float = SETTLED_S) -> Agreement:
        """Compares all requests that were recorded in the time [start, end), in Unix seconds.

        Requests that were recorded before reports were kept, or whose reports are deleted, would differ: the time begins
        with the oldest report.
        """
        async with self._database.read() as session:
            first = await agreement_rows.first_report_at(session)
            start = end if first is None else min(end, max(start, first))
            settled_at = self._clock.now() - settled_s
            found = await agreement_rows.compare_rows(session, start, end)
            found += await agreement_rows.compare_orphans(session, start, end, settled_at)
            compared = []
            for verdict, requests, billed, unbilled, reported in found:
                is_difference = Verdict(verdict).is_difference
                examples = await agreement_rows.find_examples(session, verdict, start, end) if is_difference else ()
                compared.append(Compared(Verdict(verdict), requests, billed, unbilled, reported, tuple(examples)))
            by_sums = await sum_usage(session, None, start, end, UsageGroup.DAY)
            by_rows = await sum_usage(session, None, start, end, UsageGroup.SESSION)
        return Agreement(start, end, tuple(compared), _differences(_total(by_sums), _total(by_rows)))


def _total(summaries: list[UsageSummary]) -> UsageSummary:
    total = UsageSummary(None)
    for one in summaries:
        total += one
    return total


def _differences(sums: UsageSummary, rows: UsageSummary) -> dict[str, tuple[int, int]]:
    def figures(one: UsageSummary) -> dict[str, int]:
        found = {
            "requests": one.requests,
            "prompt_tokens": one.prompt_tokens,
            "cached_tokens": one.cached_tokens,
            "completion_tokens": one.completion_tokens,
            "kv_byte_seconds": one.used.kv_byte_seconds,
            "adapter_bytes": one.used.adapter_bytes,
            "engine_us": one.work.engine_us,
        }
        return found | {f"cost {currency}": cost.atoms for currency, cost in one.costs.items()}

    by_sums, by_rows = figures(sums), figures(rows)
    names = {**by_sums, **by_rows}
    pairs = {name: (by_sums.get(name, 0), by_rows.get(name, 0)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
