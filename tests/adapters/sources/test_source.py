"""Tests of the texts that name sources, and of the operator's rules about them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.adapters.sources.source import SourceKind, SourceRules, parse_source
from graftwork.platform.errors import NotPermitted, ValidationFailed

COMMIT = "3" * 40
TWO = ("adapter_config.json", "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("text", "kind", "place", "files"),
    [
        (f"hf:acme/lora@{COMMIT}", SourceKind.HUB, "acme/lora", TWO),
        ("hf:acme/lora@refs/pr/1#v2/last", SourceKind.HUB, "acme/lora", tuple(f"v2/last/{name}" for name in TWO)),
        ("hf:acme/lora@main#lora-f16.gguf", SourceKind.HUB, "acme/lora", ("lora-f16.gguf",)),
        ("s3://models/support/3/", SourceKind.BUCKET, "models", tuple(f"support/3/{name}" for name in TWO)),
        ("https://Files.test/a/b", SourceKind.WEB, "files.test", tuple(f"a/b/{name}" for name in TWO)),
        ("https://files.test:8443/x.gguf", SourceKind.WEB, "files.test:8443", ("x.gguf",)),
    ],
)
def test_sources(text: str, kind: SourceKind, place: str, files: tuple[str, ...]) -> None:
    """A source names a place, and the two files of a folder or one GGUF file; its text is read as the same source."""
    source = parse_source(text)

    assert (source.kind, source.place, source.files) == (kind, place, files)
    assert parse_source(source.text) == source


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hf:acme/lora",
        "hf:lora@main",
        "hf:acme/lora@main#../other",
        "hf:acme/..@main",
        "s3://models",
        "s3://models/a/../b",
        "s3://UPPER/x",
        "http://files.test/a",
        "ftp://files.test/a",
        "file:///etc/passwd",
        "https://user:secret@files.test/a",
        "https://files.test/a/../b",
        "https://files.test/a/%2E%2e/b",
        "https://files.test/a#b",
        "https://files.test//a//b",
        "/etc/passwd",
        "https://files.test/" + "a" * 3000,
    ],
)
def test_texts_that_name_no_source(text: str) -> None:
    """What names no source, or a path that leads elsewhere, is refused with the field's name."""
    with pytest.raises(ValidationFailed) as caught:
        parse_source(text)

    assert caught.value.param == "source"


def test_a_signature_is_not_shown() -> None:
    """The query of a URL is kept for the request, and is in nothing that is shown."""
    source = parse_source("https://files.test/a?sig=secret")

    assert "secret" in source.text
    assert "secret" not in source.shown


@pytest.mark.parametrize(
    ("rules", "text", "is_allowed"),
    [
        (["hf:"], f"hf:acme/lora@{COMMIT}", True),
        (["hf:acme/"], "hf:acme/lora@main", True),
        (["hf:acme"], "hf:acme/lora@main", True),
        (["hf:acme"], "hf:acme-evil/lora@main", False),
        (["hf:acme/lora"], "hf:acme/lora@main", True),
        (["hf:acme/lora"], "hf:acme/lora2@main", False),
        (["https:"], "https://files.test/a", True),
        (["https://files.test"], "https://files.test/a", True),
        (["https://files.test"], "https://files.test.evil.test/a", False),
        (["https://files.test"], "https://files.test:8443/a", False),
        (["https://files.test/a/"], "https://files.test/b", False),
        (["hf:", "https:"], "s3://models/a", False),
        (["s3://models/{tenant}/"], "s3://models/ten_a/x", True),
        (["s3://models/{tenant}/"], "s3://models/ten_b/x", False),
        ([], f"hf:acme/lora@{COMMIT}", False),
    ],
)
def test_rules(rules: list[str], text: str, is_allowed: bool) -> None:
    """A rule allows what begins with it, where a part ends; the place `{tenant}` is the tenant's own."""
    source = parse_source(text)

    if is_allowed:
        SourceRules(rules).check(source, "ten_a")
    else:
        with pytest.raises(NotPermitted):
            SourceRules(rules).check(source, "ten_a")


@given(text=st.text(max_size=60), scheme=st.sampled_from(["", "hf:", "s3://", "https://", "hf:a/b@"]))
def test_any_text_is_a_source_or_refused(text: str, scheme: str) -> None:
    """Whatever the text is, it is refused, or no path of the source has a part that leads upwards."""
    try:
        source = parse_source(scheme + text)
    except ValidationFailed:
        return

    assert all(part not in ("..", ".") for path in source.files for part in path.split("/"))
    assert parse_source(source.text) == source
