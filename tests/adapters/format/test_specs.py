"""Tests of adapter names, model references and aliases."""

import random
from collections import Counter

import pytest

from graftwork.adapters.format.specs import (
    AliasTarget,
    ModelReference,
    check_adapter_name,
    check_alias,
    parse_reference,
)
from graftwork.platform.errors import ValidationFailed

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


def test_a_canary_draws_by_weight() -> None:
    """Of 10,000 draws at weights 9 and 1, about 1,000 choose the canary, within four standard deviations."""
    target = AliasTarget.from_json({"weights": {"2": 0.9, "3": 0.1}})
    generator = random.Random(7)

    drawn = Counter(target.choose(generator) for _ in range(10_000))

    assert set(drawn) == {2, 3}
    assert abs(drawn[3] - 1000) < 4 * 30


def test_one_version_is_chosen_without_drawing() -> None:
    """An alias of one version draws no random number."""
    generator = random.Random(7)
    state = generator.getstate()

    assert AliasTarget.to_version(5).choose(generator) == 5
    assert generator.getstate() == state
