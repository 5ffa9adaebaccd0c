"""Tests that the docs show the pictures that the console gives, and no others."""

import re
import struct

import pytest

from tests.api.console.browser import Browser
from tests.api.console.console_server import console_server
from tests.api.console.lively_server import OBJECTIVES
from tests.api.console.pictures import DOCS, ENGINES, PICTURES, take_all

MOST_BYTES = 150_000


@pytest.fixture(scope="module")
def made(one_browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """All pictures, made anew, by their names."""
    folder = tmp_path_factory.mktemp("pictures")
    with console_server(folder / "gateway", engines=ENGINES, objectives=OBJECTIVES) as server:
        names = take_all(one_browser, server, folder / "images")
    return {name: (folder / "images" / name).read_bytes() for name in names}


def size_of(picture: bytes) -> tuple[int, int]:
    """Width and height of a PNG."""
    width, height = struct.unpack(">II", picture[16:24])
    return width, height


def test_the_docs_name_what_is_made(made: dict[str, bytes]) -> None:
    """Each picture that a page of the docs names is made here, and each that is made is named."""
    named = {
        name for page in DOCS.glob("*.md") for name in re.findall(r"images/([\w.-]+)", page.read_text(encoding="utf-8"))
    }

    assert named == set(made)


def test_the_kept_pictures_are_those_that_are_made(made: dict[str, bytes]) -> None:
    """The docs keep a picture of each name and size, and none is larger than 150 kB."""
    kept = {one.name: one.read_bytes() for one in PICTURES.iterdir()}

    assert {name: size_of(one) for name, one in kept.items()} == {name: size_of(one) for name, one in made.items()}
    for pictures in (kept, made):
        assert {name: len(one) for name, one in pictures.items() if len(one) > MOST_BYTES} == {}
