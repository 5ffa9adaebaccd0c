"""Tests of the header that names what the server has ignored."""

from graftwork.api.http.request import ignored_header


def test_the_header_names_each_place() -> None:
    """The header has each place and what was there; without places there is no header."""
    assert ignored_header([]) == {}
    assert ignored_header(["tools[2] (web_search)", "thinking (enabled)"]) == {
        "x-graftwork-ignored": "tools[2] (web_search), thinking (enabled)"
    }


def test_the_header_is_safe_and_short() -> None:
    """Text of the client cannot end the header, and a long list ends with the number of places that it leaves out."""
    (value,) = ignored_header(
        ["tools[0] (a\r\nset-cookie: b=c, d)", *(f"input[{n}] (reasoning)" for n in range(500))]
    ).values()

    *shown, left_out = value.split(", ")
    assert shown[0] == "tools[0] (a%0D%0Aset-cookie: b=c%2C d)"
    assert left_out == f"+{501 - len(shown)} more"
    assert len(value) <= 2020
