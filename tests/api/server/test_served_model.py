"""Which model the settings select."""

from pathlib import Path

import pytest

from graftwork.api.server.served_model import model_folder
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.settings.settings import Settings


def test_a_hub_id_is_told_how_to_become_a_folder() -> None:
    """The id of a model on the Hub is no folder: the error shows the command that makes one of it."""
    with pytest.raises(InvalidRequest, match=r"--model hf:Qwen/Qwen3-0.6B@REVISION"):
        model_folder(Settings(model=Path("Qwen/Qwen3-0.6B")))


def test_what_is_no_folder_is_refused_by_its_path(tmp_path: Path) -> None:
    """A path that does not exist, and one that is a file, are told apart."""
    (tmp_path / "weights.gguf").touch()

    with pytest.raises(InvalidRequest, match="There is no folder"):
        model_folder(Settings(model=tmp_path / "nowhere"))
    with pytest.raises(InvalidRequest, match="is a file"):
        model_folder(Settings(model=tmp_path / "weights.gguf"))
    with pytest.raises(InvalidRequest, match="--demo"):
        model_folder(Settings())
