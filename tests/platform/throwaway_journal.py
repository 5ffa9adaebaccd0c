"""A usage journal for tests that do not look at it."""

import shutil
import weakref
from pathlib import Path
from tempfile import mkdtemp

from graftwork.platform.ledger.backlog import UsageBacklog
from graftwork.platform.ledger.journal import UsageJournal
from graftwork.platform.ledger.meter import UsageMeter


def throwaway_journal() -> UsageJournal:
    """Returns a journal in a folder of its own, which is removed with it."""
    folder = mkdtemp(prefix="graftwork-journal-")
    journal = UsageJournal(Path(folder))
    weakref.finalize(journal, shutil.rmtree, folder, ignore_errors=True)
    return journal


def throwaway_backlog(meter: UsageMeter) -> UsageBacklog:
    """Returns a backlog with such a journal."""
    return UsageBacklog(meter, throwaway_journal())
