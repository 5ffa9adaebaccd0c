"""Groups what a gateway does with the usage ledger besides writing it: sums, pruning, reports of engines, the check.

Owns the names and the times of this work. Never starts it: the gateway does.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.ledger.upkeep.agreement import AgreementCheck
from graftwork.platform.ledger.upkeep.engine_reports import EngineReports
from graftwork.platform.ledger.upkeep.rollups import UsageRollups
from graftwork.platform.settings.settings import Settings

_REPORTS_FOLDER = "engine-reports"
"""The folder of reports in the data folder."""
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class LedgerKeeping:
    """What keeps the ledger of one gateway."""

    rollups: UsageRollups
    reports: EngineReports
    agreement: AgreementCheck

    @classmethod
    def of(cls, settings: Settings, database: Database, clock: Clock) -> "LedgerKeeping":
        days = settings.usage_retention_days
        keep_s = None if days is None else days * _DAY_S
        return cls(
            UsageRollups(database, clock, keep_s, settings.usage_archive_dir),
            EngineReports(settings.data_dir / _REPORTS_FOLDER, database, clock),
            AgreementCheck(database, clock),
        )

    def sweeps(self) -> Mapping[str, Callable[[], Awaitable[object]]]:
        """Returns what is to be done now and then, by what it looks for."""
        return {
            "engine reports": self.reports.recover,
            "old engine reports": self.reports.drop_old,
            "old usage": self.rollups.prune,
        }
