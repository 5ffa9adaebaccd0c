"""Advances roll-outs, and rolls them back when their figures break a limit. Each gateway has one controller.

    tick, each second:   read the roll-outs that run ──► watch their versions ──► store what this gateway has counted
                         with the lease of a roll-out: judge it by the counts of all gateways ──► advance or roll back

Owns the lease, by which one gateway at a time judges a roll-out. All state is in the database, so a gateway that starts
goes on where the last one stopped. Never changes an alias itself: RolloutKeeper does.
Invariant: a roll-out is changed only as it was seen: if it has ended or advanced meanwhile, nothing happens.
"""

import logging

from graftwork.adapters.registry import rollout_rows
from graftwork.adapters.registry.rollout import Rollout, RolloutState
from graftwork.adapters.registry.rollouts import RolloutKeeper
from graftwork.platform.activity.outcomes import Outcomes, VersionKey, VersionOutcomes
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database

TICK_S = 1.0
"""Seconds between two calls of `tick`."""
LEASE_S = 5.0
"""Seconds after which another gateway may judge a roll-out whose gateway is silent."""

logger = logging.getLogger(__name__)


class RolloutController:
    """Runs the roll-outs of all tenants, together with the controllers of other gateways."""

    def __init__(
        self, database: Database, keeper: RolloutKeeper, outcomes: VersionOutcomes, gateway_id: str, clock: Clock
    ) -> None:
        """`outcomes` counts how the requests of this gateway end."""
        self._database = database
        self._keeper = keeper
        self._outcomes = outcomes
        self._gateway_id = gateway_id
        self._clock = clock
        self._stored: dict[tuple[str, int], dict[int, int]] = {}
        """By roll-out and step, how many requests of each version the database knows of."""

    async def tick(self) -> None:
        """Stores what was counted since the last call, and judges the roll-outs whose lease this gateway gets."""
        async with self._database.read() as session:
            rollouts = await rollout_rows.running(session)
        self._watch(rollouts)
        for rollout in rollouts:
            await self._report(rollout)
            await self._judge(rollout)
        self._stored = {
            key: counts for key, counts in self._stored.items() if key in {(r.id, r.step) for r in rollouts}
        }

    def _watch(self, rollouts: list[Rollout]) -> None:
        self._outcomes.watch((key, (rollout.id, rollout.step)) for rollout in rollouts for _, key in _versions(rollout))

    async def _report(self, rollout: Rollout) -> None:
        """Stores this gateway's counts of a roll-out's versions, if they have changed."""
        purpose = (rollout.id, rollout.step)
        counts = {version: self._outcomes.counted(key, purpose) for version, key in _versions(rollout)}
        counted = {version: outcomes for version, outcomes in counts.items() if outcomes.requests}
        requests = {version: outcomes.requests for version, outcomes in counted.items()}
        if requests == self._stored.get((rollout.id, rollout.step), {}):
            return
        async with self._database.write() as session:
            await rollout_rows.put_figures(session, rollout, self._gateway_id, counted)
        self._stored[rollout.id, rollout.step] = requests

    async def _judge(self, rollout: Rollout) -> None:
        now = self._clock.now()
        async with self._database.write() as session:
            if not await rollout_rows.take_lease(session, rollout, self._gateway_id, now, LEASE_S):
                return
            figures = await rollout_rows.figures(session, rollout)
        canary, stable = figures.get(rollout.version, Outcomes()), figures.get(rollout.stable, Outcomes())
        broken = rollout.broken_limit(canary, stable)
        if broken is not None:
            if await self._keeper.end(rollout, RolloutState.ROLLED_BACK, broken) is not None:
                logger.warning("rolled %s back to version %d: %s", rollout.canary_label, rollout.stable, broken)
        elif rollout.is_step_over(canary, now):
            await self._keeper.advance(rollout)


def _versions(rollout: Rollout) -> tuple[tuple[int, VersionKey], ...]:
    """Returns the new version and the stable one, each with the key of its outcomes."""
    return (
        (rollout.version, (rollout.tenant_id, rollout.canary_label)),
        (rollout.stable, (rollout.tenant_id, rollout.stable_label)),
    )
