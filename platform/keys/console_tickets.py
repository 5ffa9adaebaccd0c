"""Makes and reads console tickets: what a browser holds instead of an API key after a sign-in, and what a person's
command line sends.

    gwc_<gw or gwa>_<public id>_<session>_<ends>_<until>_<seal>

A ticket names the API key by its public id, and never contains the key's secret. The seal is an HMAC-SHA256 under the
pepper over the other parts and the stored hash of the key. So every gateway with the same pepper can check a ticket
without a table of sessions, and a ticket ends when its key is rotated, revoked, deleted or expired. The ticket of the
admin key, which has no row, is sealed over the digest of the admin key, and ends when that key is changed. The ticket of
a person names the key with which the person acts in a tenant, or the person for an operator (`platform/people/seats.py`).

A ticket is short-lived. A page that is in use renews it until the session ends, twelve hours after the sign-in with a
key. The text `session` is random and stays the same when a ticket is renewed; the token against forged requests (CSRF) is derived from it, so all
tabs of a browser have the same one.
Invariant: this module never logs, and no repr shows a seal.
"""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field, replace

from graftwork.platform.errors import NotAuthenticated
from graftwork.platform.keys.keys import KeyKind, KeyParts, hash_key

TICKET_FOR_S = 30 * 60
"""Seconds for which a ticket is valid after it was made or renewed."""
SESSION_FOR_S = 12 * 60 * 60
"""Seconds after the sign-in at which the last ticket of a session ends."""
TICKET_EXPIRED = "console_session_expired"
"""The code of the error for a ticket whose time is over. It does not count as a wrong key."""
ADMIN_ID = "admin"
"""The public id in tickets of the admin key. No person's ticket has it."""

_FORM = re.compile(r"gwc_(gwa?)_([0-9A-Za-z]{1,64})_([0-9a-f]{32})_([0-9]{1,12})_([0-9]{1,12})_([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class ConsoleTicket:
    """The parts of a ticket. `ends` and `until` are in unix seconds."""

    kind: KeyKind
    public_id: str
    session: str
    ends: int
    """The time at which the session ends, however often the ticket is renewed."""
    until: int
    """The time at which the ticket ends."""
    seal: str = field(default="", repr=False)

    @property
    def text(self) -> str:
        """The whole ticket, as the cookie holds it."""
        return f"{self._unsealed}_{self.seal}"

    @property
    def _unsealed(self) -> str:
        return f"gwc_{self.kind}_{self.public_id}_{self.session}_{self.ends}_{self.until}"

    def check_time(self, now: float) -> None:
        """Raises NotAuthenticated if the ticket has ended at `now`, in unix seconds."""
        if now >= self.until:
            raise NotAuthenticated("Your session in the console has ended; sign in again.", code=TICKET_EXPIRED)

    def is_of(self, key_hash: bytes | None, pepper: bytes) -> bool:
        """Returns whether the server has made this ticket for the key with this hash. None is no key."""
        right = self._seal(key_hash or bytes(hashlib.sha256().digest_size), pepper)
        return hmac.compare_digest(right, self.seal) and key_hash is not None

    def sealed(self, key_hash: bytes, pepper: bytes) -> "ConsoleTicket":
        return replace(self, seal=self._seal(key_hash, pepper))

    def renewed(self, now: float, key_hash: bytes, pepper: bytes) -> "ConsoleTicket":
        """Returns the same session's next ticket. The session's end does not move."""
        return replace(self, until=min(int(now) + TICKET_FOR_S, self.ends)).sealed(key_hash, pepper)

    def for_seat(self, kind: KeyKind, public_id: str, key_hash: bytes, pepper: bytes) -> "ConsoleTicket":
        """Returns a ticket of the same session and time with which the same person acts as somebody else."""
        return replace(self, kind=kind, public_id=public_id).sealed(key_hash, pepper)

    def csrf_token(self, pepper: bytes) -> str:
        """Returns the token that a state-changing request of this session must have in a header."""
        text = b"graftwork console csrf\0" + self.session.encode()
        return hmac.new(pepper, text, hashlib.sha256).hexdigest()

    def _seal(self, key_hash: bytes, pepper: bytes) -> str:
        text = b"graftwork console ticket\0" + self._unsealed.encode() + b"\0" + key_hash
        return hmac.new(pepper, text, hashlib.sha256).hexdigest()


def parse_ticket(text: str) -> ConsoleTicket | None:
    """Returns the parts of a ticket, or None if `text` does not have the form of a ticket. Checks neither seal nor time."""
    match = _FORM.fullmatch(text)
    if match is None:
        return None
    kind, public_id, session, ends, until, seal = match.groups()
    return ConsoleTicket(KeyKind(kind), public_id, session, int(ends), int(until), seal)


def ticket_of_key(key: KeyParts, now: float, pepper: bytes) -> ConsoleTicket:
    """Returns a new session's first ticket, for a tenant's key that has just been authenticated."""
    return _new(KeyKind.TENANT, key.public_id, now).sealed(hash_key(key, pepper), pepper)


def ticket_of_admin(key_digest: bytes, now: float, pepper: bytes) -> ConsoleTicket:
    """Returns a new session's first ticket, for the admin key with this digest."""
    return _new(KeyKind.ADMIN, ADMIN_ID, now).sealed(key_digest, pepper)


def _new(kind: KeyKind, public_id: str, now: float) -> ConsoleTicket:
    return ConsoleTicket(kind, public_id, secrets.token_hex(16), int(now) + SESSION_FOR_S, int(now) + TICKET_FOR_S)


def ticket_of_seat(
    kind: KeyKind, public_id: str, key_hash: bytes, *, ends: float, until: float, pepper: bytes
) -> ConsoleTicket:
    """Returns a new session's first ticket for a person. `ends` is the session's end, in unix seconds."""
    first = ConsoleTicket(kind, public_id, secrets.token_hex(16), int(ends), int(min(ends, until)))
    return first.sealed(key_hash, pepper)
