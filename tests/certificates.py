"""Certificates for tests, made with the program `openssl`."""

import subprocess
from pathlib import Path

from graftwork.engine.rpc.engine_tls import EngineTls

NAME = "engines.internal"
"""The name in the certificates of engines."""
_EC_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Authority:
    """Signs certificates with the program `openssl`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder / name
        self._folder.mkdir()
        self.ca = self._folder / "ca.pem"
        self._ca_key = self._folder / "ca.key"
        _run("req", "-x509", *_EC_KEY, "-subj", f"/CN={name}", "-keyout", self._ca_key, "-out", self.ca)

    def issue(self, name: str, dns: str = NAME) -> EngineTls:
        """A certificate for `dns`, and its key."""
        cert, key, asked, names = (self._folder / f"{name}.{kind}" for kind in ("pem", "key", "csr", "ext"))
        names.write_text(f"subjectAltName=DNS:{dns}")
        _run("req", *_EC_KEY, "-subj", f"/CN={name}", "-keyout", key, "-out", asked)
        signed_by = ("-CA", self.ca, "-CAkey", self._ca_key, "-CAcreateserial", "-extfile", names)
        _run("x509", "-req", "-in", asked, *signed_by, "-days", "2", "-out", cert)
        return EngineTls(self.ca, cert, key, NAME)


def _run(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
