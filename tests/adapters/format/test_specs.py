"""Tests of adapter names, model references and aliases."""

from collections import Counter

import pytest

from graftwork.adapters.format.specs import (
    AliasTarget,
    Caller,
    ModelReference,
    check_adapter_name,
    check_alias,
    parse_reference,
)
from graftwork.platform.errors import ValidationFailed
from graftwork.platform.ids import KeyId, SessionId

HOSTILE = [
    "",
    "../x",
    "/abs",
    "a/b",
    "a@b",
    "a\0b",
    "a b",
    "A",
    ".hidden",
    "-flag",
    "_x",
    "a\n",
    "\n",
    "ä",
    "аdapter",
    "a" * 64,
    "a" * 4096,
    "\ud800",
    "a\u202e",
]


@pytest.mark.parametrize("name", ["a", "0", "support-bot", "v1.2_x", "a" * 63, "a..b"])
def test_a_plain_name_is_an_adapters(name: str) -> None:
    """A name may have lower-case letters, digits, dots, dashes and underscores."""
    check_adapter_name(name, "tiny")
    assert parse_reference(name) == ModelReference(name)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_refused_and_echoed_harmlessly(name: str) -> None:
    """A name with a path, a separator or look-alike letters is refused; the message is safe to log."""
    with pytest.raises(ValidationFailed) as caught:
        check_adapter_name(name, "tiny")

    assert caught.value.param == "name"
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 1000
    caught.value.message.encode()
    assert parse_reference(name) is None or "@" in name


def test_the_base_models_name_is_taken() -> None:
    """An adapter cannot have the name of the base model."""
    with pytest.raises(ValidationFailed) as caught:
        check_adapter_name("tiny", "tiny")

    assert caught.value.param == "name"


@pytest.mark.parametrize("alias", [*HOSTILE, "3", "007"])
def test_an_alias_is_neither_hostile_nor_a_number(alias: str) -> None:
    """An alias cannot be a number, because `name@3` is always a version, nor a hostile text."""
    with pytest.raises(ValidationFailed) as caught:
        check_alias(alias)

    assert caught.value.param == "alias"


@pytest.mark.parametrize(
    ("model", "reference"),
    [
        ("a", ModelReference("a")),
        ("a@3", ModelReference("a", version=3)),
        ("a@999999999", ModelReference("a", version=999_999_999)),
        ("a@prod", ModelReference("a", alias="prod")),
        ("a@3x", ModelReference("a", alias="3x")),
        ("a@", None),
        ("@3", None),
        ("@", None),
        ("a@@3", None),
        ("a@3@4", None),
        ("a@0", None),
        ("a@03", None),
        ("a@-1", None),
        ("a@1.5e3", ModelReference("a", alias="1.5e3")),
        ("a@٣", None),
        ("a@" + "9" * 20, None),
        ("a@Prod", None),
        ("a@../x", None),
        (" a", None),
        ("a@3\n", None),
    ],
)
def test_the_forms_of_a_model(model: str, reference: ModelReference | None) -> None:
    """Each text is read as exactly one kind of model reference, or refused."""
    assert parse_reference(model) == reference


@pytest.mark.parametrize("body", [{"version": 2}, {"weights": {"2": 0.9, "3": 0.1}}, {"weights": {"9": 1, "10": 2}}])
def test_a_target_is_answered_as_it_came(body: dict[str, object]) -> None:
    """An alias target survives the way to JSON and back."""
    assert AliasTarget.from_json(body).to_json() == body


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (None, "target"),
        ([], "target"),
        ({}, "target"),
        ({"version": "2"}, "target"),
        ({"version": True}, "target"),
        ({"version": 0}, "target"),
        ({"version": 2, "weights": {"2": 1}}, "target"),
        ({"version": 2, "x": 1}, "target"),
        ({"weights": {}}, "target"),
        ({"weights": [2, 3]}, "target"),
        ({"weights": {"2": 0}}, "weights.2"),
        ({"weights": {"2": -1}}, "weights.2"),
        ({"weights": {"2": float("nan")}}, "weights.2"),
        ({"weights": {"2": float("inf")}}, "weights.2"),
        ({"weights": {"2": True}}, "weights.2"),
        ({"weights": {"2": "1"}}, "weights.2"),
        ({"weights": {"prod": 1}}, "weights.prod"),
        ({"weights": {"02": 1}}, "weights.02"),
    ],
)
def test_a_wrong_target_is_refused_by_its_field(body: object, param: str) -> None:
    """A wrong alias target is refused with its field; zero, NaN and true are not weights."""
    with pytest.raises(ValidationFailed) as caught:
        AliasTarget.from_json(body)

    assert caught.value.param == param


def users(count: int = 10_000) -> list[Caller]:
    return [Caller("user", f"user-{number}") for number in range(count)]


def choices(weights: dict[str, float], callers: list[Caller], alias: str = "adp_1@prod") -> list[int]:
    target = AliasTarget.from_json({"weights": weights})
    return [target.choose(alias, caller) for caller in callers]


@pytest.mark.parametrize("alias", ["adp_1@prod", "adp_1@beta", "adp_01hzx@prod"])
def test_a_canary_gets_its_share_of_the_users(alias: str) -> None:
    """Of 10,000 users at weights 90 and 10, the canary gets 10 %, within one percentage point."""
    chosen = Counter(choices({"1": 90, "2": 10}, users(), alias))

    assert abs(chosen[2] / 10_000 - 0.10) < 0.01
    assert chosen[1] + chosen[2] == 10_000


def test_three_versions_get_their_shares() -> None:
    """Weights need not sum to 1, and every version gets its share within one percentage point."""
    chosen = Counter(choices({"1": 5, "2": 3, "9": 2}, users()))

    assert [abs(chosen[version] / 10_000 - share) < 0.01 for version, share in ((1, 0.5), (2, 0.3), (9, 0.2))] == [
        True
    ] * 3


@pytest.mark.parametrize("canary", ["1", "2"])
def test_a_growing_canary_keeps_its_users(canary: str) -> None:
    """Who is in a canary of 10 % is in it at 20 %, 50 % and 99 % too, also if it is the older version."""
    other = "1" if canary == "2" else "2"
    before: set[int] = set()
    for share in (10, 20, 50, 99):
        chosen = choices({other: 100 - share, canary: share}, users())
        inside = {index for index, version in enumerate(chosen) if version == int(canary)}

        assert before <= inside
        before = inside


def test_a_third_version_moves_users_only_to_itself() -> None:
    """If a version joins a canary, no user moves between the versions that were there before."""
    before = choices({"1": 60, "2": 40}, users())
    after = choices({"1": 60, "2": 40, "3": 10}, users())

    assert {new for old, new in zip(before, after, strict=True) if old != new} == {3}


def test_canaries_of_two_aliases_are_independent() -> None:
    """The users in one alias's canary are not those in another's: of a canary's users, a tenth is in the other."""
    first, second = (choices({"1": 90, "2": 10}, users(), alias) for alias in ("adp_1@prod", "adp_2@prod"))
    both = sum(one == two == 2 for one, two in zip(first, second, strict=True))

    assert 50 <= both <= 150


def test_the_choice_is_the_same_in_every_process() -> None:
    """The choice is fixed by known values, so that gateways of later releases agree with those of today."""
    target = AliasTarget.from_json({"weights": {"1": 1, "2": 1}})
    callers = [Caller(kind, "a") for kind in ("session", "user", "key")] + [
        Caller("user", "\ud800"),
        Caller("user", "ä"),
    ]

    assert [target.choose("adp_1@prod", caller) for caller in callers] == [1, 1, 1, 2, 2]


def test_a_caller_is_the_session_then_the_user_then_the_key() -> None:
    """The session comes before the end user, and the end user before the key; an empty name is no user."""
    key, session = KeyId("key_1"), SessionId("ses_1")

    assert [
        Caller.of(key, user="ann", session_id=session),
        Caller.of(key, user="ann"),
        Caller.of(key, user=""),
        Caller.of(key),
    ] == [Caller("session", "ses_1"), Caller("user", "ann"), Caller("key", "key_1"), Caller("key", "key_1")]


def test_an_alias_of_one_version_gives_it_to_everyone() -> None:
    """An alias of one version chooses this version for every caller."""
    assert {AliasTarget.to_version(5).choose("adp_1@prod", caller) for caller in users(100)} == {5}
