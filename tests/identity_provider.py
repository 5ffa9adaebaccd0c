"""An OpenID Connect provider that says what a test wants: right things, and all kinds of wrong ones.

It makes its tokens with the primitives of `cryptography` alone, so that a fault of the JWT library in the server cannot
hide behind the same fault here. It answers in process (`transport`), or on a port of this machine (`listening_provider`).
"""

import base64
import hashlib
import hmac
import json
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlsplit

import httpx
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa, utils
from cryptography.hazmat.primitives.hashes import SHA256

CONSOLE, CLI = "console-client", "cli-client"
DEVICE_GRANT = "urn:ietf:params:oauth:grant-type:device_code"


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _number(value: int, size: int | None = None) -> str:
    return b64(value.to_bytes(size or (value.bit_length() + 7) // 8))


@dataclass(frozen=True)
class SigningKey:
    """A private key with the name of its public half."""

    kid: str
    alg: str
    private: Any

    @property
    def jwk(self) -> dict[str, str]:
        named = {"kid": self.kid, "alg": self.alg, "use": "sig"}
        public = self.private.public_key()
        if isinstance(public, rsa.RSAPublicKey):
            numbers = public.public_numbers()
            return named | {"kty": "RSA", "n": _number(numbers.n), "e": _number(numbers.e)}
        if isinstance(public, ec.EllipticCurvePublicKey):
            point = public.public_numbers()
            return named | {"kty": "EC", "crv": "P-256", "x": _number(point.x, 32), "y": _number(point.y, 32)}
        return named | {"kty": "OKP", "crv": "Ed25519", "x": b64(public.public_bytes_raw())}

    def sign(self, text: bytes) -> bytes:
        match self.alg:
            case "RS256":
                signed: bytes = self.private.sign(text, padding.PKCS1v15(), SHA256())
            case "PS256":
                signed = self.private.sign(text, padding.PSS(padding.MGF1(SHA256()), 32), SHA256())
            case "ES256":
                r, s = utils.decode_dss_signature(self.private.sign(text, ec.ECDSA(SHA256())))
                signed = r.to_bytes(32) + s.to_bytes(32)
            case _:
                signed = self.private.sign(text)
        return signed


_RSA = [rsa.generate_private_key(public_exponent=65537, key_size=2048) for _ in range(2)]  # slow to make


def new_key(alg: str = "RS256", kid: str | None = None, number: int = 0) -> SigningKey:
    made: dict[str, Callable[[], Any]] = {
        "RS256": lambda: _RSA[number],
        "PS256": lambda: _RSA[number],
        "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
        "EdDSA": ed25519.Ed25519PrivateKey.generate,
    }
    return SigningKey(kid or secrets.token_hex(4), alg, made[alg]())


def signed(header: Mapping[str, Any], claims: Mapping[str, Any], sign: Callable[[bytes], bytes]) -> str:
    """A token with these parts."""
    text = f"{b64(json.dumps(header).encode())}.{b64(json.dumps(claims).encode())}"
    return f"{text}.{b64(sign(text.encode()))}"


def hmac_token(claims: Mapping[str, Any], secret: bytes, kid: str) -> str:
    """A token whose HMAC is made with a text that everybody knows, such as a public key."""
    return signed({"alg": "HS256", "kid": kid}, claims, lambda text: hmac.digest(secret, text, hashlib.sha256))


@dataclass
class IdentityProvider:
    """The provider. `now` is its clock; `claims` go into the next tokens over the right ones."""

    issuer: str
    now: Callable[[], float]
    key: SigningKey = field(default_factory=new_key)
    keys: list[SigningKey] = field(default_factory=list)
    """What it publishes; by default `key`."""
    subject: str = "ada"
    claims: dict[str, Any] = field(default_factory=dict)
    document: dict[str, Any] = field(default_factory=dict)
    """What the discovery document says over the right things."""
    device_answers: list[str] = field(default_factory=list)
    """Errors of the next polls of the device flow; then it gives tokens."""
    interval_s: float = 5
    """The seconds between two polls of the device flow."""
    refreshes: list[str] = field(default_factory=list)
    """The refresh tokens that are valid."""
    is_away: bool = False
    asked: list[str] = field(default_factory=list)
    """The paths that were asked for."""
    make_token: Callable[[dict[str, Any]], str] | None = None
    """Makes the next ID tokens from their claims, instead of a right signature."""

    def __post_init__(self) -> None:
        self._codes: dict[str, dict[str, str]] = {}
        self._used: dict[str, dict[str, str]] = {}

    def token(self, client_id: str = CONSOLE, nonce: str | None = None, **claims: Any) -> str:
        """An ID token, right but for `claims`. A claim of None is left out."""
        now = self.now()
        made: dict[str, Any] = {"iss": self.issuer, "sub": self.subject, "aud": client_id, "iat": now, "exp": now + 300}
        made |= {
            "jti": secrets.token_hex(8),
            "nonce": nonce,
            "email": f"{self.subject}@example.com",
            "email_verified": True,
        }
        made |= {**self.claims, **claims}
        made = {name: value for name, value in made.items() if value is not None}
        if self.make_token is not None:
            return self.make_token(made)
        return signed({"alg": self.key.alg, "kid": self.key.kid}, made, self.key.sign)

    def authorize(self, address: str) -> str:
        """What a browser gets at the authorization endpoint once the person has agreed: the address to go back to."""
        query = dict(parse_qsl(urlsplit(address).query))
        assert query["response_type"] == "code"
        assert query["code_challenge_method"] == "S256"
        code = secrets.token_urlsafe(16)
        self._codes[code] = query
        return f"{query['redirect_uri']}?{httpx.QueryParams(code=code, state=query['state'])}"

    def accept_again(self, back: str) -> None:
        """Takes the code of an address to go back to once more, as no provider should."""
        code = dict(parse_qsl(urlsplit(back).query))["code"]
        self._codes[code] = self._used[code]

    def handle(self, path: str, form: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
        """The status and the body of an answer."""
        self.asked.append(path)
        if self.is_away:
            return 503, {}
        match path:
            case "/.well-known/openid-configuration":
                return 200, self._discovery()
            case "/keys":
                return 200, {"keys": [key.jwk for key in (self.keys or [self.key])]}
            case "/device":
                codes = {"device_code": "device-code", "user_code": "WDJB-MJHT"}
                pages = {"verification_uri": f"{self.issuer}/enter", "expires_in": 600, "interval": self.interval_s}
                return 200, codes | pages
            case "/token":
                return self._tokens(form)
            case "/revoke":
                self.refreshes = [token for token in self.refreshes if token != form["token"]]
                return 200, {}
        return 404, {}

    @property
    def transport(self) -> httpx.MockTransport:
        def answer(request: httpx.Request) -> httpx.Response:
            status, body = self.handle(request.url.path, dict(parse_qsl(request.content.decode())))
            return httpx.Response(status, json=body)

        return httpx.MockTransport(answer)

    def _discovery(self) -> dict[str, Any]:
        endpoints = {"authorization_endpoint": "authorize", "token_endpoint": "token", "jwks_uri": "keys"}
        endpoints |= {"device_authorization_endpoint": "device", "revocation_endpoint": "revoke"}
        right = {name: f"{self.issuer}/{path}" for name, path in endpoints.items()}
        return {"issuer": self.issuer, **right, **self.document}

    def _tokens(self, form: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
        nonce, client_id = None, form.get("client_id", CONSOLE)
        match form["grant_type"]:
            case "authorization_code":
                begun = self._codes.pop(form["code"], None)
                challenge = b64(hashlib.sha256(form["code_verifier"].encode()).digest())
                wanted = (challenge, form["redirect_uri"])
                self._used[form["code"]] = begun or {}
                if begun is None or wanted != (begun["code_challenge"], begun["redirect_uri"]):
                    return 400, {"error": "invalid_grant"}
                nonce = begun["nonce"]
            case "refresh_token":
                if form["refresh_token"] not in self.refreshes:
                    return 400, {"error": "invalid_grant"}
                self.refreshes.remove(form["refresh_token"])
            case _:
                assert form["grant_type"] == DEVICE_GRANT
                if self.device_answers:
                    return 400, {"error": self.device_answers.pop(0)}
        self.refreshes.append(refresh := secrets.token_urlsafe(16))
        return 200, {"id_token": self.token(client_id, nonce), "refresh_token": refresh, "access_token": "opaque"}


@contextmanager
def listening_provider(now: Callable[[], float]) -> Iterator[IdentityProvider]:
    """A provider on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if urlsplit(self.path).path != "/authorize":
                return self._answer({})
            self.send_response(303)  # a person who agrees at once
            self.send_header("location", provider.authorize(self.path))
            self.end_headers()
            return None

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0))).decode()
            self._answer({name: values[0] for name, values in parse_qs(body).items()})

        def _answer(self, form: Mapping[str, str]) -> None:
            status, body = provider.handle(urlsplit(self.path).path, form)
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        provider = IdentityProvider(f"http://127.0.0.1:{server.server_address[1]}", now)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield provider
        finally:
            server.shutdown()
            thread.join()
