"""Tests of the strict parser of JSON bodies."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.platform.errors import InvalidRequest
from graftwork.platform.strict_json import MAX_CONTAINERS, MAX_DEPTH, MAX_VALUES, parse_json

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES)
def test_sound_json(value: object) -> None:
    """Every valid JSON value is read unchanged, escaped or not."""
    assert parse_json(json.dumps(value).encode()) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value


@given(st.binary(max_size=64))
def test_noise(body: bytes) -> None:
    """Any bytes parse as JSON or raise InvalidRequest, and nothing else."""
    with suppress(InvalidRequest):
        parse_json(body)


@pytest.mark.parametrize(("depth", "sound"), [(MAX_DEPTH, True), (MAX_DEPTH + 1, False), (100_000, False)])
def test_depth(depth: int, sound: bool) -> None:
    """The limit on nesting is exact, and much deeper values do not overflow the stack."""
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        body = (opening * depth + ("" if opening == "[" else "1") + closing * depth).encode()
        if sound:
            parse_json(body)
        else:
            with pytest.raises(InvalidRequest, match="deep"):
                parse_json(body)


@pytest.mark.parametrize("body", [b"[NaN]", b"[-Infinity]", b"9" * 5000, b'"\\udc00"', b'{"\\ud800": 1}', b"\xff"])
def test_what_fails_later(body: bytes) -> None:
    """Values that Python parses and databases or tokenizers cannot hold are refused."""
    with pytest.raises(InvalidRequest):
        parse_json(body)


def test_number_of_containers() -> None:
    """The limit on lists and objects is exact, wherever they stand."""
    for one in ("[]", "{}"):
        sound = "[" + ",".join([one] * (MAX_CONTAINERS - 1)) + "]"
        assert len(parse_json(sound.encode())) == MAX_CONTAINERS - 1
        with pytest.raises(InvalidRequest, match=f"more than {MAX_CONTAINERS} lists and objects"):
            parse_json((sound[:-1] + f",{one}]").encode())


def test_number_of_values() -> None:
    """The limit on values is exact, and counts those of all lists and objects together."""
    halves = ["1," * (MAX_VALUES // 2 - 1) + "1"] * 2
    with pytest.raises(InvalidRequest, match=f"more than {MAX_VALUES} values"):
        parse_json(f"[[{halves[0]}],[{halves[1]}]]".encode())

    assert len(parse_json(f"[{halves[0]},{halves[1]}]".encode())) == MAX_VALUES
