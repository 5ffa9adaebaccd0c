"""The settings of one subject: which engines there are, and how gateways and engines find and trust each other."""

from dataclasses import dataclass
from pathlib import Path

from graftwork.platform.ids import FIRST_GENERATION
from graftwork.platform.settings.setting import setting
from graftwork.platform.settings.values import parse_fleet, parse_path, parse_text, parse_token, seconds, whole


@dataclass(frozen=True)
class FleetSettings:
    """Which engines there are, and how gateways and engines find and trust each other."""

    engine_address: str | None = setting(None, parse_text)
    """The gRPC address of the engine, or the addresses of several with commas between. None starts an engine as a child
    of this process.
    """
    replicas: int = setting(1, whole(0, 64))
    """Engines that `serve` starts, 1 to 64, or 0 with `max_replicas`. They divide the memory and disk of the settings
    between them.
    """
    max_replicas: int | None = setting(None, whole(1, 64))
    """With a number, `serve` runs `replicas` to so many engines, by their load. Memory and disk are divided by it. With
    0 replicas, the last engine ends when nothing needs it, and the next request starts one.
    """
    scale_first_token_s: float = setting(2.0, seconds(0.01, 3600))
    """Seconds, 0.01 to 3600: with `max_replicas`, engines start when new requests would wait longer for a first token."""
    scale_down_after_s: float = setting(300.0, seconds(1, 86400))
    """Seconds, 1 to 86400: with `max_replicas`, an engine ends when nothing has needed it for so long."""
    fleet: str = setting("static", parse_fleet)
    """Where a gateway finds its engines: `static` (`engine_address`, or the engines that it starts) or `leases` (all
    engines that have a lease in the database). An engine with `leases` takes a lease.
    """
    replica_id: str | None = setting(None, parse_text)
    """The name of an engine in the list of replicas. None takes one from the machine's name and the address."""
    advertise: str | None = setting(None, parse_text)
    """The address at which gateways reach an engine with a lease. None takes that at which it listens."""
    generation: int = setting(FIRST_GENERATION, whole(1, 2**31 - 1))
    """The generation of an engine, 1 to 2³¹ − 1. Engines of one model name and generation must have the same weights and
    version; those of the next generation may differ, for a rolling upgrade.
    """
    drain_grace_s: float = setting(30.0, seconds(0, 86400))
    """Seconds, 0 to 86400, that the requests of a draining engine have to end there. The rest goes on elsewhere."""
    engine_token: str | None = setting(None, parse_token, is_secret=True)
    """The secret that an engine demands of its gateways. An engine that other machines can reach needs one. `serve`
    makes one for its own engine at each start.
    """
    engine_tls_ca: Path | None = setting(None, parse_path)
    """The PEM file of the authority that signs the certificates of engines and gateways."""
    engine_tls_cert: Path | None = setting(None, parse_path)
    """The PEM file of the certificate with which an engine or a gateway proves to the other who it is."""
    engine_tls_key: Path | None = setting(None, parse_path)
    """The PEM file of the private key of `engine_tls_cert`."""
    engine_tls_name: str | None = setting(None, parse_text)
    """The name in the certificates of all engines. None means the host in each engine's address."""
    engine_silence_s: float = setting(5.0, seconds(0.1, 3600))
    """Seconds, 0.1 to 3600: if the engine's process answers no ping for so long, its requests end with a 503. The
    engine that `serve` started is killed and started again after four times as long."""
    step_timeout_s: float = setting(120.0, seconds(0.1, 86400))
    """Seconds, 0.1 to 86400: if the engine works for so long without finishing one layer of the model, its requests end
    with a 503. The engine that `serve` started is killed and started again."""
