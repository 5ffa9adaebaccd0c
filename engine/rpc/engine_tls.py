"""Encrypts the connections between gateways and an engine, and proves both ends to each other (mutual TLS).

Each end has a certificate of one authority, which issues certificates for nothing else. An engine serves whoever shows
such a certificate. A gateway also compares the name in the engine's certificate with the host of the address, or with
one name for all engines. The connections on Unix sockets stay plain, because they never leave the machine.

An engine reads its files again when they change, so that certificates are renewed without a restart. A gateway reads
its files when it connects to an engine for the first time.
"""

import logging
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from graftwork.platform.errors import InvalidRequest

_log = logging.getLogger(__name__)

Options = Sequence[tuple[str, object]]


@dataclass(frozen=True, slots=True)
class EngineTls:
    """The PEM files with which one end of a connection between a gateway and an engine proves who it is."""

    ca: Path
    """The certificate of the authority that signs those of all engines and gateways."""
    cert: Path
    """The certificate of this end, and after it those that lead to the authority."""
    key: Path
    """The private key of `cert`, without a password."""
    name: str | None = None
    """The name in the certificates of all engines. None means the host in each engine's address."""

    def check(self) -> None:
        """Raises InvalidRequest if a file cannot be read, or the certificate and the key do not fit each other."""
        for setting, path in (("engine_tls_ca", self.ca), ("engine_tls_cert", self.cert), ("engine_tls_key", self.key)):
            if not path.is_file():
                flag = f"--{setting.replace('_', '-')}"
                raise InvalidRequest(f"{path} is no file: name a PEM file with {flag}.", param=setting)
        try:
            context = ssl.create_default_context(cafile=self.ca)
            context.load_cert_chain(self.cert, self.key, password=_refuse_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise InvalidRequest(
                f"{self.ca}, {self.cert} and {self.key} cannot be used for TLS ({error}): give the authority's "
                "certificate, a certificate that it has signed, and the private key of this one without a password, all "
                "in PEM form.",
                param="engine_tls_cert",
            ) from error

    def server_credentials(self) -> grpc.ServerCredentials:
        """Returns what an engine listens with. At each handshake it uses the newest files that can be used.

        Raises InvalidRequest as `check` does.
        """
        renewal = _Renewal(self)
        credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            renewal.first,
            renewal.changed,  # type: ignore[arg-type]  # None keeps the last files
            require_client_authentication=True,
        )
        return credentials

    def open_channel(self, address: str, options: Options) -> grpc.aio.Channel:
        """Returns a channel to the engine at `address` that refuses an engine without a certificate of the authority.

        Raises InvalidRequest as `check` does.
        """
        self.check()
        credentials = grpc.ssl_channel_credentials(*self._contents())
        named = [] if self.name is None else [("grpc.ssl_target_name_override", self.name)]
        return grpc.aio.secure_channel(address, credentials, options=[*options, *named])

    def _contents(self) -> tuple[bytes, bytes, bytes]:
        return self.ca.read_bytes(), self.key.read_bytes(), self.cert.read_bytes()


class _Renewal:
    """Reads an engine's files again when one of them has changed."""

    def __init__(self, tls: EngineTls) -> None:
        tls.check()
        self._tls = tls
        self._seen = tls._contents()
        self.first = self._configuration()

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Is called before each handshake, on a thread of gRPC. Returns None if the last files stay in use."""
        try:
            contents = self._tls._contents()
            if contents == self._seen:
                return None
            self._tls.check()
        except (InvalidRequest, OSError) as error:
            _log.error("engine_tls_kept", extra={"reason": str(error)})
            return None
        self._seen = contents
        _log.info("engine_tls_read", extra={"certificate": str(self._tls.cert)})
        return self._configuration()

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        ca, key, cert = self._seen
        configuration: grpc.ServerCertificateConfiguration = grpc.ssl_server_certificate_configuration(
            [(key, cert)], root_certificates=ca
        )
        return configuration


def encrypts(address: str) -> bool:
    """Returns whether connections to the gRPC address `address` are encrypted where there are certificates."""
    return not address.startswith(("unix:", "unix-abstract:"))


def _refuse_password() -> str:
    """Is called for a key with a password. Without it, OpenSSL would ask for the password at the terminal."""
    raise ValueError("the key has a password")
