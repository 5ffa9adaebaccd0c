"""Counts in Redis how much of its limits each owner of limits has used. The counts are exact for any number of gateways.

One Lua script (quotas.lua) checks and counts for all owners of a request in one step. It uses the time of Redis, so the
clocks of the gateways do not matter. Each answer of a running request takes one of the slots that the limits of running
requests allow. All keys of an organisation and its tenants, or of a tenant without one, have one hash tag.

A slot is a lease: `keep_alive` renews it while the request runs. If a gateway dies, its slots become free when their
leases end. If Redis forgets a running request, because it stalled or was emptied, the next renewal counts it again.
The end of a reservation is sent again until Redis confirms it. A reservation is undone in the same way if its gateway
does not know whether Redis has made it.
"""

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from weakref import WeakValueDictionary

from redis.asyncio import RedisCluster

from graftwork.platform.clock import Clock
from graftwork.platform.errors import Unavailable
from graftwork.platform.ids import new_id
from graftwork.platform.quotas.budget import MonthlyBudget, Reserved, ReservedCost, SpendLedger
from graftwork.platform.quotas.limits import Limits
from graftwork.platform.quotas.quota import WINDOW_S, Standing
from graftwork.platform.quotas.redis_connection import (
    LIMITS_UNAVAILABLE,
    REDIS_ERRORS,
    AnyRedis,
    close,
    connect,
    not_usable,
)

LEASE_S = 30.0
ANSWER_WITHIN_S = 5.0
_KEY_NAMES = ("log", "tokens", "running", "held", "sums", "answers", "ended", "costs")
_MAX_UNCONFIRMED = 10_000
"""The most ends of reservations that are kept to be sent again. Without them, the slots become free with their leases."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Command:
    """One call of quotas.lua: what it does, for which owners, and the arguments that follow those of every call."""

    verb: str
    owners: "_Owners"
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Owners:
    """Whose counts a request is in. `group_id` is the hash tag of their keys."""

    group_id: str
    owner_ids: tuple[str, ...]

    @classmethod
    def of(cls, limits: Limits) -> "_Owners":
        return cls(limits.group_id, tuple(owner.owner_id for owner in limits.owners))

    def keys(self, prefix: str) -> list[str]:
        """Returns the keys of quotas.lua. The owner whose id is the hash tag has the names that it always had."""
        return [
            f"{prefix}quota:{{{self.group_id}}}:{'' if owner_id == self.group_id else owner_id + ':'}{name}"
            for owner_id in self.owner_ids
            for name in _KEY_NAMES
        ]


class _Script:
    """Runs quotas.lua for any owners. Times are in whole microseconds."""

    def __init__(self, redis: AnyRedis, prefix: str, lease_s: float, clock: Clock | None) -> None:
        source = files("graftwork").joinpath("platform", "quotas", "quotas.lua").read_text()
        self._redis = redis
        self._run = redis.register_script(source)
        self._prefix = prefix
        self._lease_s = lease_s
        self._clock = clock

    async def __call__(self, command: _Command) -> object:
        """Runs one command. Raises Unavailable when Redis does not answer."""
        with _redis_errors():
            answer: object = await self._run(keys=self._keys(command), args=self._arguments(command))
        return answer

    async def run_all(self, commands: Sequence[_Command]) -> None:
        """Runs commands in their order, with few messages to Redis. Raises Unavailable when Redis does not answer."""
        if isinstance(self._redis, RedisCluster):  # its pipelines know no scripts
            for command in commands:
                await self(command)
            return
        with _redis_errors():
            async with self._redis.pipeline(transaction=False) as pipeline:
                for command in commands:
                    await self._run(keys=self._keys(command), args=self._arguments(command), client=pipeline)
                await pipeline.execute()

    def _keys(self, command: _Command) -> list[str]:
        return command.owners.keys(self._prefix)

    def _arguments(self, command: _Command) -> list[str]:
        now = "" if self._clock is None else _microseconds(self._clock.monotonic())
        return [command.verb, now, _microseconds(WINDOW_S), _microseconds(self._lease_s), *command.arguments]


@contextmanager
def _redis_errors() -> Iterator[None]:
    try:
        yield
    except REDIS_ERRORS as error:
        message = "The limits cannot be checked at present; send the request again shortly."
        raise Unavailable(message, code=LIMITS_UNAVAILABLE, retry_after_s=1.0) from error


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class RedisReservation:
    """One request's reservation in `RedisQuotaKeeper`. Implements `Reservation`."""

    entry_id: str
    owners: _Owners
    tokens: int
    answers: int
    nanos: int
    limits: Limits
    standings: tuple[Standing, ...]
    """One for each owner; none for a request that was admitted without Redis."""
    leases: "_Leases"

    def rate_limit_headers(self) -> dict[str, str]:
        return self.limits.headers(self.standings)

    async def settle(self, actual_tokens: int) -> None:
        await self.leases.end(self, _Command("settle", self.owners, (self.entry_id, str(actual_tokens))))

    async def refund(self) -> None:
        await self.leases.end(self, _Command("refund", self.owners, (self.entry_id, "")))


class _Leases:
    """The reservations of this gateway that run, and the ends that Redis has not confirmed."""

    def __init__(self, script: _Script) -> None:
        self._script = script
        self._running: WeakValueDictionary[str, RedisReservation] = WeakValueDictionary()
        """By id. A reservation that nobody refers to any more will never be ended, so its lease is not renewed."""
        self._unconfirmed: OrderedDict[str, _Command] = OrderedDict()
        """By reservation, oldest first: the command that ends it."""
        self.is_silent = False
        """Whether Redis is known not to answer. Then ends are only kept, so that no request waits for it."""

    def begin(self, reservation: RedisReservation) -> None:
        self._running[reservation.entry_id] = reservation

    async def end(self, reservation: RedisReservation, command: _Command) -> None:
        """Ends a reservation. If Redis does not answer, `keep_alive` sends the command again.

        Does nothing if the reservation has ended before.
        """
        if self._running.pop(reservation.entry_id, None) is None:
            return
        self._remember(reservation.entry_id, command)
        if self.is_silent:
            return
        try:
            await self._script(command)
        except Unavailable:
            logger.warning("quota %s waits", command.verb, extra={"owners": command.owners.owner_ids}, exc_info=True)
        else:
            self._unconfirmed.pop(reservation.entry_id, None)

    def undo(self, entry_id: str, owners: _Owners) -> None:
        """Lets `keep_alive` end a reservation that Redis may have made. Its request is not served."""
        self._remember(entry_id, _Command("refund", owners, (entry_id, "")))

    async def keep_alive(self) -> None:
        """Renews the leases of all reservations that run, and sends the unconfirmed ends again.

        Raises Unavailable when Redis does not answer.
        """
        ends = dict(self._unconfirmed)
        renewals: dict[_Owners, list[str]] = defaultdict(list)
        for entry_id, running in tuple(self._running.items()):
            renewals[running.owners] += [entry_id, str(running.tokens), str(running.answers), str(running.nanos)]
        commands = [_Command("renew", owners, tuple(entries)) for owners, entries in renewals.items()]
        if ends or commands:
            await self._script.run_all([*commands, *ends.values()])
        for entry_id in ends:
            self._unconfirmed.pop(entry_id, None)

    def _remember(self, entry_id: str, command: _Command) -> None:
        self._unconfirmed[entry_id] = command
        if len(self._unconfirmed) > _MAX_UNCONFIRMED:
            self._unconfirmed.popitem(last=False)


class RedisQuotaKeeper:
    """Implements `QuotaKeeper` for several gateways, which count together in one Redis."""

    def __init__(
        self,
        redis_url: str,
        prefix: str,
        clock: Clock,
        ledger: SpendLedger,
        *,
        lease_s: float = LEASE_S,
        answer_within_s: float = ANSWER_WITHIN_S,
        window_clock: Clock | None = None,
    ) -> None:
        """`clock` determines the present month. `window_clock` replaces Redis's own time in tests.

        A reservation that is not renewed for `lease_s` seconds loses its slots. A command that Redis does not answer
        within `answer_within_s` seconds is sent once more, and then fails. Raises InvalidRequest if `redis_url` is no
        address of Redis.
        """
        self._redis = connect(redis_url, answer_within_s)
        self._script = _Script(self._redis, prefix, lease_s, window_clock)
        self._leases = _Leases(self._script)
        self._budget = MonthlyBudget(ledger, clock)

    async def check_reachable(self) -> None:
        """Checks that Redis answers. Raises Unavailable with the reason if it does not."""
        try:
            await self._redis.ping()
        except REDIS_ERRORS as error:
            raise not_usable(error) from error

    async def is_reachable(self) -> bool:
        """Returns whether Redis answers."""
        try:
            await self.check_reachable()
        except Unavailable:
            return False
        return True

    async def reserve(
        self, limits: Limits, estimated_tokens: int, answers: int = 1, cost: ReservedCost | None = None
    ) -> RedisReservation:
        entry_id, owners, nanos = new_id("rsv"), _Owners.of(limits), 0 if cost is None else cost.nanos
        arguments = [entry_id, str(estimated_tokens), str(answers), str(nanos)]
        for owner in limits.owners:
            quota = owner.quota
            most = (quota.requests_per_minute, quota.tokens_per_minute, quota.max_concurrent_requests)
            arguments += ["" if limit is None else str(limit) for limit in most]
        try:
            answer = await self._script(_Command("reserve", owners, tuple(arguments)))
        except BaseException:  # also when the caller is cancelled: Redis may have made the reservation
            self._leases.undo(entry_id, owners)
            raise
        assert isinstance(answer, list)
        refusing, limit, wait, *figures = answer
        counts = [figures[first : first + 5] for first in range(0, len(figures), 5)]
        standings = tuple(Standing(int(one[0]), int(one[1]), _seconds(one[2])) for one in counts)
        if limit:
            owner = limits.owners[int(refusing) - 1]
            raise limits.exceeded(owner, limit, _seconds(wait) if wait else None, standings)
        reservation = RedisReservation(
            entry_id, owners, estimated_tokens, answers, nanos, limits, standings, self._leases
        )
        self._leases.begin(reservation)
        reserved = [Reserved(int(one[3]), int(one[4])) for one in counts]
        await self._budget.check(limits, cost, reserved, reservation)
        return reservation

    @property
    def is_silent(self) -> bool:
        """Whether Redis is known not to answer. While it is, the ends of reservations are kept and not sent."""
        return self._leases.is_silent

    @is_silent.setter
    def is_silent(self, value: bool) -> None:
        self._leases.is_silent = value

    def adopt(self, limits: Limits, tokens: int, answers: int, cost: ReservedCost | None) -> RedisReservation:
        """Returns a reservation for a request that was admitted without Redis. The next renewal counts it there."""
        owners, nanos = _Owners.of(limits), 0 if cost is None else cost.nanos
        reservation = RedisReservation(new_id("rsv"), owners, tokens, answers, nanos, limits, (), self._leases)
        self._leases.begin(reservation)
        return reservation

    async def keep_alive(self) -> None:
        await self.renew()

    async def renew(self) -> bool:
        """Does what `keep_alive` does. Returns whether Redis has answered."""
        try:
            await self._leases.keep_alive()
        except Unavailable as error:
            logger.warning("leases of quota not renewed", extra={"reason": str(error.__cause__)})
            return False
        return True

    async def close(self) -> None:
        """Sends the ends of reservations that Redis has not confirmed, and closes all connections to Redis."""
        await self.keep_alive()
        await close(self._redis)


def _microseconds(seconds: float) -> str:
    return str(round(seconds * 1_000_000))


def _seconds(microseconds: str) -> float:
    return int(microseconds) / 1_000_000
