"""Tests of the file with the sign-ins: who can read it, and what is in it."""

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from graftwork.api.sdk.login.login_file import LoginFile, StoredLogin
from graftwork.api.sdk.transport.errors import ConfigurationError

LOGIN = StoredLogin(
    "https://a.test",
    "https://login.test",
    "cli",
    ("openid",),
    "per_1",
    None,
    "refresh",
    "operator",
    "tenant",
    "ten_1",
    9.0,
)


@pytest.fixture
def file(tmp_path: Path) -> LoginFile:
    return LoginFile(tmp_path / "own" / "logins.json")


def test_sign_ins_are_kept_by_server(file: LoginFile) -> None:
    """Each server has its sign-in, which is read as it was written, and forgotten alone."""
    other = replace(LOGIN, url="https://b.test", person_id="per_2")
    for login in (LOGIN, other, replace(LOGIN, expires_at=10.0)):
        file.keep(login)

    assert file.find("https://a.test") == replace(LOGIN, expires_at=10.0)
    assert [file.forget("https://a.test") for _ in range(2)] == [True, False]
    assert (file.find("https://a.test"), file.find("https://b.test")) == (None, other)


def test_only_the_person_can_read_it(file: LoginFile) -> None:
    """File and lock are for the owner alone, also where they are replaced, and one that others can read is refused."""
    for _ in range(2):
        with file.locked():
            file.keep(LOGIN)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (file.path, file.path.with_suffix(".lock"))]
    folder = stat.S_IMODE(file.path.parent.stat().st_mode)
    file.path.chmod(0o644)

    assert (modes, folder) == ([0o600, 0o600], 0o700)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        file.find(LOGIN.url)


def test_no_token_is_shown(file: LoginFile) -> None:
    """The repr of a sign-in has no token."""
    assert not any(f"'{token}'" in repr(LOGIN) for token in ("refresh", "operator", "tenant"))


@pytest.mark.parametrize("text", ["{", "\udcff", "[]"])
def test_a_spoiled_file(file: LoginFile, text: str) -> None:
    """A file that is no JSON says what to do; JSON of another form is no sign-in."""
    file.keep(LOGIN)
    file.path.write_bytes(text.encode("utf-8", "surrogateescape"))

    if text == "[]":
        assert file.find(LOGIN.url) is None
    else:
        with pytest.raises(ConfigurationError, match="sign in again"):
            file.find(LOGIN.url)
