"""Reads the certificate and the private key with which the gateway serves HTTPS, and reads them again when they change.

Also finds the certificates of the connections between gateways and engines in the settings (`engine_tls`).

Owns the TLS contexts. Never makes a certificate. Invariant: new connections get the newest pair of files that fit each
other. Connections that are already open keep the certificate that they began with.

The server listens with one context for its whole life. At each handshake, OpenSSL calls `_use_newest`, which gives the
connection the context of the newest pair. So each pair is loaded once, into a context of its own, and a pair that cannot
be loaded changes nothing.
"""

import asyncio
import logging
import ssl
from pathlib import Path

from graftwork.engine.rpc.engine_tls import EngineTls
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.settings.settings import Settings

logger = logging.getLogger(__name__)


class TlsFiles:
    """A certificate chain and its private key, in two PEM files."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Reads both files. Raises InvalidRequest if they cannot be read, or do not fit each other."""
        self._certificate = certificate
        self._key = key
        self._versions = self._read_versions()
        self._newest = self.context = self._read()
        self.context.sni_callback = self._use_newest

    @classmethod
    def of(cls, settings: Settings) -> "TlsFiles | None":
        """Returns the files that the settings name, or None if the settings name none.

        Raises InvalidRequest if the settings name only one of the two, or files that cannot be used.
        """
        if settings.tls_cert is None and settings.tls_key is None:
            return None
        if settings.tls_cert is None:
            raise InvalidRequest(
                "--tls-key needs --tls-cert: name the file of the certificate chain.", param="tls_cert"
            )
        if settings.tls_key is None:
            raise InvalidRequest("--tls-cert needs --tls-key: name the file of its private key.", param="tls_key")
        return cls(settings.tls_cert, settings.tls_key)

    async def refresh(self) -> None:
        """Reads the files again if one of them has changed. If the new ones cannot be used, keeps the old ones."""
        versions = await asyncio.to_thread(self._read_versions)
        if versions == self._versions:
            return
        try:
            self._newest = await asyncio.to_thread(self._read)
        except InvalidRequest as error:
            logger.error("the old TLS certificate stays in use: %s", error.message)
            return
        self._versions = versions
        logger.info("tls_certificate_read", extra={"certificate": str(self._certificate)})

    def _use_newest(self, connection: ssl.SSLObject, _server_name: str | None, _context: ssl.SSLContext) -> None:
        """Is called in each handshake, also if the client names no server."""
        connection.context = self._newest

    def _read(self) -> ssl.SSLContext:
        for name, path in (("tls_cert", self._certificate), ("tls_key", self._key)):
            if not path.is_file():
                raise InvalidRequest(f"{path} is no file: name a PEM file with --{name.replace('_', '-')}.", param=name)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self._certificate, self._key, password=_refuse_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise InvalidRequest(
                f"{self._certificate} and {self._key} cannot be used for TLS ({error}): give a certificate chain and "
                "its private key without a password, both in PEM form.",
                param="tls_cert",
            ) from error
        return context

    def _read_versions(self) -> tuple[tuple[int, int], ...]:
        """Returns the time of change and the inode of each file, to see whether it has changed."""
        found = []
        for path in (self._certificate, self._key):
            try:
                status = path.stat()
            except OSError:
                found.append((0, 0))
            else:
                found.append((status.st_mtime_ns, status.st_ino))
        return tuple(found)


def engine_tls(settings: Settings) -> EngineTls | None:
    """Returns the files that protect the connections between gateways and engines, or None if the settings name none.

    Raises InvalidRequest if the settings name some of them and not all.
    """
    files = {name: getattr(settings, name) for name in ("engine_tls_ca", "engine_tls_cert", "engine_tls_key")}
    missing = [name for name, path in files.items() if path is None]
    if len(missing) == len(files) and settings.engine_tls_name is None:
        return None
    if missing:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise InvalidRequest(
            f"TLS between gateways and engines needs an authority, a certificate and its key: give {flags} as well.",
            param=missing[0],
        )
    return EngineTls(
        files["engine_tls_ca"], files["engine_tls_cert"], files["engine_tls_key"], settings.engine_tls_name
    )


def _refuse_password() -> str:
    """Is called for a key with a password. Without it, OpenSSL would ask for the password at the terminal."""
    raise ValueError("the key has a password")
