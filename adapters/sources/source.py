"""Says where the server fetches an adapter from, and where the operator lets it fetch.

    hf:ORGANISATION/NAME@REVISION[#FOLDER]    a repository of the Hugging Face Hub, at a commit, tag or branch
    s3://BUCKET/PREFIX                        a bucket
    https://HOST/PATH                         a web server; needs the digest of the files

Each names a folder with PEFT's two files, or one file that ends with `.gguf`. Owns how such a text is read, and the rules
about it. Never connects to anything.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from graftwork.platform.errors import NotPermitted, ValidationFailed
from graftwork.platform.outbound.public_addresses import check_url

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
TENANT_PLACE = "{tenant}"
"""Stands for the id of the tenant in a rule."""
_GGUF = ".gguf"
_MAX_CHARACTERS = 2000
_HUB = re.compile(
    r"hf:(?P<place>[\w.-]{1,96}/[\w.-]{1,96})@(?P<revision>[\w./-]{1,120})(?:#(?P<path>[\w./-]{1,300}))?", re.ASCII
)
_BUCKET = re.compile(r"s3://(?P<place>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/(?P<path>[\w./=+-]{1,1000})", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


class SourceKind(StrEnum):
    HUB = "hf"
    BUCKET = "s3"
    WEB = "https"


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """A place from which an adapter can be fetched."""

    kind: SourceKind
    place: str
    """`ORGANISATION/NAME` on the Hub, the name of a bucket, or `HOST` or `HOST:PORT`."""
    path: str
    """The folder or file in that place, without slashes at its ends; empty for the whole place."""
    revision: str = ""
    """The commit, tag or branch on the Hub."""
    query: str = ""
    """The query of a URL, which may hold a signature: it is sent, and never shown."""

    @property
    def is_gguf(self) -> bool:
        return self.path.endswith(_GGUF)

    @property
    def is_pinned(self) -> bool:
        """Whether the Hub always has the same files there."""
        return _COMMIT.fullmatch(self.revision) is not None

    @property
    def files(self) -> tuple[str, ...]:
        """The paths of the files to be fetched, in their order."""
        if self.is_gguf:
            return (self.path,)
        return tuple(f"{self.path}/{name}" if self.path else name for name in (CONFIG_FILE, WEIGHTS_FILE))

    @property
    def shown(self) -> str:
        """The source as answers, audit rows and errors show it."""
        match self.kind:
            case SourceKind.HUB:
                return f"hf:{self.place}@{self.revision}" + (f"#{self.path}" if self.path else "")
            case SourceKind.BUCKET:
                return f"s3://{self.place}/{self.path}"
            case SourceKind.WEB:
                return f"https://{self.place}/{self.path}"

    @property
    def text(self) -> str:
        """The source as `parse_source` reads it, with the query."""
        return self.shown + (f"?{self.query}" if self.query else "")

    def at(self, commit: str) -> "AdapterSource":
        """Returns the same source at a commit of the Hub."""
        return replace(self, revision=commit)


def parse_source(text: str) -> AdapterSource:
    """Reads a source. Raises ValidationFailed for one of no known form."""
    if len(text) > _MAX_CHARACTERS:
        raise _refused(f"a source has at most {_MAX_CHARACTERS} characters")
    if matched := _HUB.fullmatch(text):
        source = AdapterSource(
            SourceKind.HUB, matched["place"], (matched["path"] or "").strip("/"), matched["revision"]
        )
    elif matched := _BUCKET.fullmatch(text):
        source = AdapterSource(SourceKind.BUCKET, matched["place"], matched["path"].strip("/"))
    elif text.startswith("https://"):
        source = _web_source(text)
    elif text.startswith("hf:") and "@" not in text:
        raise _refused(
            "name a revision of the Hub's repository, such as hf:acme/support-lora@3f2a…: a commit never changes"
        )
    else:
        raise _refused("write hf:ORGANISATION/NAME@REVISION, s3://BUCKET/PREFIX or https://HOST/PATH")
    parts = (*source.place.split("/"), *source.path.split("/"), *source.revision.split("/"))
    if any(set(part) == {"."} for part in parts) or "//" in source.path or "%2e" in source.path.lower():
        raise _refused("a path has no parts such as '.' and '..'")
    return source


def _web_source(text: str) -> AdapterSource:
    parts = check_url(text, "source")
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    place = f"{host}:{parts.port}" if parts.port not in (None, 443) else str(host)
    return AdapterSource(SourceKind.WEB, place, parts.path.strip("/"), query=parts.query)


class SourceRules:
    """Where tenants may let the server fetch adapters from."""

    def __init__(self, allowed: Sequence[str]) -> None:
        """`allowed` are beginnings of sources: a kind (`hf:`, `https:`), an organisation (`hf:acme/`), a host
        (`https://models.example.com/`), or a bucket with a prefix (`s3://models/{tenant}/`).
        """
        self._allowed = tuple(allowed)

    def check(self, source: AdapterSource, tenant_id: str) -> None:
        """Raises NotPermitted for a source that the operator does not allow this tenant."""
        if any(_begins(source.shown, rule.replace(TENANT_PLACE, tenant_id)) for rule in self._allowed):
            return
        known = ", ".join(self._allowed).replace(TENANT_PLACE, tenant_id) or "nowhere"
        raise NotPermitted(
            f"This server does not fetch adapters from {source.shown}; it fetches them from: {known}. Upload the files, or "
            "ask the operator (adapter_sources).",
            param="source",
            code="source_not_allowed",
        )

    def names_organisation(self, source: AdapterSource) -> bool:
        """Returns whether a rule names the source's organisation on the Hub, and does not only allow the Hub as a whole."""
        rules = (rule for rule in self._allowed if rule.startswith("hf:") and rule != "hf:")
        return source.kind is SourceKind.HUB and any(_begins(source.shown, rule) for rule in rules)


def _begins(text: str, rule: str) -> bool:
    """Returns whether `rule` is the beginning of `text`, and ends there where a part of the text ends."""
    if not text.startswith(rule):
        return False
    return rule.endswith(("/", ":")) or text[len(rule) :][:1] in ("", "/", "@", "#")


def _refused(what: str) -> ValidationFailed:
    return ValidationFailed(f"source: {what}.", param="source", code="invalid_source")
