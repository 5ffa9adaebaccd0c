"""Names a gateway, and keeps its lease: the proof in the database that the gateway runs.

    keep_alive, again and again ──► the gateway holds what is stored under its id
    no keep_alive for `lease_s` ──► others may take what it held
    the gateway starts again    ──► the same at once, for what its former process held

Owns the gateway's row. Never knows what the gateway holds. All times are the database's, so the clocks of gateways do
not matter.
Invariant: a gateway that lost its lease may still run. So a write of what it held must check, in the same transaction,
that nobody has taken it meanwhile.
"""

import hashlib
import socket
from dataclasses import dataclass, field
from typing import Self

from graftwork.platform.clock import Clock
from graftwork.platform.database import Database, WriteSession
from graftwork.platform.gateways import repository
from graftwork.platform.ids import new_id

LEASE_S = 30.0
_FORGOTTEN_AFTER_LEASES = 100
"""After so many lengths of a lease, the row of a dead gateway is deleted. Without a row, it counts as dead as well."""


@dataclass(frozen=True, slots=True)
class GatewayLease:
    """The lease of one gateway process. Each start of a gateway makes a new one; see `of_gateway`."""

    lease_s: float = LEASE_S
    """The seconds after the last `keep_alive` after which the gateway counts as dead."""
    clock: Clock | None = None
    """Replaces the database's own time in tests."""
    gateway_id: str = field(default_factory=lambda: new_id("gateway"))
    owner: str | None = None
    """The gateway's name, with which its id begins; None if each start has another name."""

    @classmethod
    def of_gateway(cls, owner: str | None, lease_s: float = LEASE_S, clock: Clock | None = None) -> Self:
        """Returns the lease of a new process of the gateway named `owner`; see `owner_name`."""
        if owner is None:
            return cls(lease_s, clock)
        return cls(lease_s, clock, f"{owner}.{new_id('gw').removeprefix('gw_')}", owner)

    async def take_over(self, session: WriteSession) -> None:
        """Ends the leases of the gateway's former processes. Call this once at start: then none of them runs, because
        only one process can listen at a gateway's address.
        """
        if self.owner is not None:
            await repository.forget_others(session, f"{self.owner}.", self.gateway_id)

    async def renew(self, session: WriteSession) -> None:
        """Stores that the gateway runs now."""
        await repository.note_seen(session, self.gateway_id, self.clock)

    async def sweep(self, session: WriteSession) -> None:
        """Deletes the rows of gateways that died long ago."""
        await repository.forget_silent(session, _FORGOTTEN_AFTER_LEASES * self.lease_s, self.clock)

    async def count_alive(self, database: Database) -> int:
        """Returns how many gateways run, this one included."""
        async with database.read() as session:
            return max(1, await repository.count_alive(session, self.lease_s, self.clock))

    async def end(self, database: Database) -> None:
        """Gives the lease back, so that others need not wait for its end."""
        async with database.write() as session:
            await repository.forget(session, self.gateway_id)


def owner_name(host: str, port: int) -> str | None:
    """Returns a name for a gateway, computed from the machine's name and the address at which the gateway listens.

    No two running gateways have the same name. The name stays the same after a restart, so that the gateway finds its
    own turns again. It does not contain the data folder, because gateways may share one.
    Returns None if the system chooses the port, because each start then gets another port.
    """
    if port == 0:
        return None
    return hashlib.sha256(f"{socket.gethostname()} {host}:{port}".encode()).hexdigest()[:32]
