"""Signs alerts, so that their receivers can tell them from forgeries and from repetitions of old ones.

    graftwork-signature: t=1764000000,v1=<hex of HMAC-SHA256(secret, "1764000000." + body)>

Owns the form of the header, and the secrets. A secret follows from the webhook's id and the server's pepper, so no table
has it.
"""

import hashlib
import hmac

SIGNATURE_HEADER = "graftwork-signature"
TOLERANCE_S = 300
"""How old a signature may be, for receivers."""


def webhook_secret(webhook_id: str, pepper: bytes) -> str:
    """Returns the secret of a webhook, as text that its receiver is shown once."""
    return "whsec_" + hmac.digest(pepper, b"graftwork webhook\0" + webhook_id.encode(), hashlib.sha256).hex()


def sign(secret: str, body: bytes, now: float) -> str:
    """Returns the value of the header for a body that is sent at `now`, in Unix seconds."""
    return f"t={int(now)},v1={_digest(secret, str(int(now)), body)}"


def is_signed(secret: str, body: bytes, header: str, now: float) -> bool:
    """Returns whether a body was signed with this secret less than five minutes ago. Receivers may use it."""
    fields = dict(part.split("=", 1) for part in header.split(",") if "=" in part)
    at = fields.get("t", "")
    if not at.isascii() or not at.isdecimal() or abs(now - int(at)) > TOLERANCE_S:
        return False
    return hmac.compare_digest(_digest(secret, at, body), fields.get("v1", ""))


def _digest(secret: str, at: str, body: bytes) -> str:
    return hmac.new(secret.encode(), at.encode() + b"." + body, hashlib.sha256).hexdigest()
