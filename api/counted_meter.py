"""The usage ledger, with what is entered there counted for the metrics as well."""

from graftwork.platform.database import Database
from graftwork.platform.metering import UsageEvent, UsageMeter
from graftwork.platform.telemetry import Telemetry


class CountedMeter(UsageMeter):
    """Counts a request once, as the ledger does."""

    def __init__(self, database: Database, telemetry: Telemetry) -> None:
        super().__init__(database)
        self._telemetry = telemetry

    async def record(self, event: UsageEvent) -> bool:
        is_new = await super().record(event)
        if is_new:
            # The ledger does not tell the tiers of a cache apart; until host and disk hold pages, all is the device's.
            tokens_by_tier = {"device": event.cached_tokens, "recomputed": event.prompt_tokens - event.cached_tokens}
            self._telemetry.count_tokens(event.tenant_id, tokens_by_tier, event.completion_tokens)
            self._telemetry.count_request(event.tenant_id, event.outcome)
        return is_new
