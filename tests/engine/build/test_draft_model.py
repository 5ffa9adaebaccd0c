"""Which draft models an engine refuses, and with which words."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from graftwork.engine.build.devices import check_draft_model
from graftwork.engine.build.runner import build_draft_model
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.model.config import ModelConfig, read_model_config
from graftwork.platform.errors import InvalidRequest
from tests.engine.random_models import make_base

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture
def make(root: Path, tmp_path: Path) -> Make:
    """Makes a model folder with a tokenizer of these tokens, or without one."""

    def make(name: str, tokens: dict[str, int] | None, **settings: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        content = json.loads((root / "config.json").read_text()) | settings
        (folder / "config.json").write_text(json.dumps(content))
        (folder / "model.safetensors").symlink_to(root / "model.safetensors")
        if tokens is not None:
            own = {"model": {"vocab": tokens}, "added_tokens": [{"content": "<end>", "id": 90}]}
            (folder / "tokenizer.json").write_text(json.dumps(own))
        return folder

    return make


def check(served: Path, draft: Path, **settings: Any) -> ModelConfig | None:
    config = EngineConfig(served, draft_model=draft, **settings)
    return check_draft_model(config, read_model_config(served))


def test_equal_tokens_are_taken_whatever_the_size_of_the_embedding(make: Make) -> None:
    """A draft model with the same tokens and more unused rows is read."""
    served, draft = make("served", {"a": 0, "b": 1}), make("draft", {"b": 1, "a": 0}, vocab_size=128)

    found = check(served, draft)

    assert found is not None
    assert found.vocab_size == 128


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"a": 0, "b": 2}, "'b' has the id 2 there and 1 here"),
        ({"a": 0, "b": 1, "c": 2}, "'c' has the id 2 there and none here"),
        ({"a": 0}, "'b' has the id none there and 1 here"),
    ],
)
def test_another_vocabulary_is_refused_with_a_token(make: Make, own: dict[str, int], message: str) -> None:
    """The refusal names the first token that differs, with both ids, and what to give."""
    served, draft = make("served", {"a": 0, "b": 1}), make("draft", own)

    with pytest.raises(InvalidRequest, match=message) as refused:
        check(served, draft)

    assert refused.value.param == "draft_model"
    assert "same tokenizer" in refused.value.message


def test_without_a_tokenizer_the_sizes_must_be_equal(make: Make) -> None:
    """Where there is nothing to compare but the number of tokens, it must be the same."""
    served = make("served", {"a": 0})

    assert check(served, make("equal", None)) is not None
    with pytest.raises(InvalidRequest, match="has 128 tokens and the served model 97"):
        check(served, make("larger", None, vocab_size=128))


def test_a_tokenizer_that_is_none_is_refused(make: Make) -> None:
    """A file that holds no tokenizer is named."""
    served, draft = make("served", {"a": 0}), make("draft", None)
    (draft / "tokenizer.json").write_text("[]")

    with pytest.raises(InvalidRequest, match=r"draft/tokenizer\.json holds no tokenizer"):
        check(served, draft)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"max_draft_tokens": 0}, "--max-draft-tokens 0"), ({"tensor_parallel": 2}, "--tensor-parallel")],
)
def test_settings_with_which_it_cannot_be_used_are_named(make: Make, settings: dict[str, int], message: str) -> None:
    """A draft model that would draft nothing, or that would need to be divided, is refused."""
    with pytest.raises(InvalidRequest, match=message):
        check(make("served", {"a": 0}), make("draft", {"a": 0}), **settings)


def test_a_model_that_is_not_supported_is_said_to_be_the_draft_model(make: Make) -> None:
    """A wrong setting in the draft model's configuration is told with its folder."""
    served, draft = make("served", {"a": 0}), make("draft", {"a": 0}, hidden_act="relu")

    with pytest.raises(InvalidRequest, match=r"The draft model .*/draft is not served: .*hidden_act") as refused:
        check(served, draft)

    assert refused.value.param == "draft_model"


def test_memory_without_room_for_a_page_is_refused(root: Path) -> None:
    """The refusal says how many bytes are the least."""
    config = EngineConfig(root, draft_model=root, draft_kv_bytes=100, dtype="float32", page_tokens=4)

    with pytest.raises(InvalidRequest, match="--draft-kv-bytes 100 holds no page") as refused:
        build_draft_model(config, read_model_config(root), torch.device("cpu"), 1)

    least = int(refused.value.message.split("at least ")[1].split()[0])
    enough = replace(config, draft_kv_bytes=least)
    assert build_draft_model(enough, read_model_config(root), torch.device("cpu"), 1) is not None
