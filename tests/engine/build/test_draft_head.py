"""Which draft heads an engine refuses, and with which words; and what a head takes of the memory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from graftwork.engine.build.draft_head import check_draft_head
from graftwork.engine.build.engine import build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.draft_head.head_config import HeadConfig
from graftwork.engine.model.config import read_model_config
from graftwork.platform.errors import InvalidRequest
from tests.engine.draft_head.eagle3 import make_head
from tests.engine.random_models import FolderSource, make_base

LAYERS = 7
Change = Callable[[dict[str, torch.Tensor]], object]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("models") / "base", num_layers=LAYERS)


def check(base: Path, head: Path, **settings: Any) -> HeadConfig | None:
    return check_draft_head(EngineConfig(base, draft_head=head, **settings), read_model_config(base))


def open_with(base: Path, head: Path, **settings: Any) -> Any:
    options: dict[str, Any] = {"dtype": "float32", "device_bytes": 4 * 2**20, "page_tokens": 4} | settings
    return build_engine(EngineConfig(base, draft_head=head, **options), lambda _: FolderSource({}, {}))


def test_layers_that_are_read_follow_from_the_number_of_layers_or_from_the_file(base: Path, tmp_path: Path) -> None:
    """Without a word, the inputs of layers 2, n/2 and n-3; else the outputs of the layers that the file counts from 0."""
    plain = check(base, make_head(tmp_path / "plain", base))
    told = check(base, make_head(tmp_path / "told", base, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3, 5]}))

    assert plain is not None
    assert told is not None
    assert (plain.after_layers, told.after_layers) == ((2, 3, 4), (1, 4, 6))
    assert plain.layer.context_tokens == 256  # that of the served model, and not the 64 of the head's file


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architectures": ["LlamaForCausalLMEagle"]}, "is no draft head; served is EAGLE-3"),
        ({"draft_vocab_size": 98}, "draft_vocab_size 98 is above the vocabulary of 97"),
        ({"num_hidden_layers": 2}, "a draft head has one layer"),
        ({"vocab_size": 96}, "its vocabulary are of 96 and those of the served model of 97"),
        ({"hidden_size": 64, "head_dim": 16}, "its hidden states are of 64 and those of the served model of 32"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"residual_factor": 2}, "residual_factor 2: no such setting"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 9]}}, "the served model has 7"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}}, "it belongs to another model"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "all"}}, "must be a list of layers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state must be true"),
        ({"eagle_config": {"depth": 3}}, "has a setting that is not known"),
    ],
)
def test_a_wrong_setting_is_named(base: Path, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    """A head of another form or of another model is refused at start, in a sentence with its folder."""
    folder = make_head(tmp_path / "head", base)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))

    with pytest.raises(InvalidRequest, match=message) as refused:
        check(base, folder)

    assert refused.value.param == "draft_head"
    assert refused.value.message.startswith(f"The draft head {folder} is not served: ")


def test_a_file_without_a_draft_vocabulary_is_no_head(base: Path) -> None:
    """A whole model is refused as a head."""
    with pytest.raises(InvalidRequest, match="draft_vocab_size is missing: this is no EAGLE-3 head"):
        check(base, base)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"max_draft_tokens": 0}, "--max-draft-tokens 0"), ({"tensor_parallel": 2}, "--tensor-parallel"), ({"draft_model": Path("x")}, "--draft-model")],
)  # fmt: skip
def test_settings_with_which_it_cannot_be_used_are_named(
    base: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    """A head that would guess nothing, that would need to be divided, or beside a draft model, is refused."""
    with pytest.raises(InvalidRequest, match=f"--draft-head does not work with {message}"):
        check(base, make_head(tmp_path / "head", base), **settings)


def drop(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: torch.Tensor) -> Change:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("draft_vocab", "change", "message"),
    [
        (None, drop("fc.weight"), "has no tensor 'fc.weight'"),
        (None, put("fc.weight", torch.zeros(32, 64)), r"'fc.weight' has shape \(32, 64\), not \(32, 96\)"),
        (None, put("layers.0.fc.weight", torch.zeros(2)), "no EAGLE-3 head has, 'layers.0.fc.weight'"),
        (40, drop("d2t"), "it guesses 40 of 97 tokens, and has no d2t"),
        (40, put("d2t", torch.zeros(39, dtype=torch.int64)), r"d2t must be int64 \[40\]"),
        (40, put("d2t", torch.full((40,), 58)), "d2t names a token twice, or one outside the vocabulary of 97"),
    ],
)
def test_wrong_tensors_are_named(
    base: Path, tmp_path: Path, draft_vocab: int | None, change: Change, message: str
) -> None:
    """A missing, misshapen or unknown tensor ends the start with a sentence that names it."""
    folder = make_head(tmp_path / "head", base, draft_vocab=draft_vocab)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")

    with pytest.raises(InvalidRequest, match=message) as refused:
        open_with(base, folder)

    assert refused.value.message.startswith(f"The draft head {folder} is not served: ")


def test_a_pickle_is_refused_with_what_to_do(base: Path, tmp_path: Path) -> None:
    """Weights in a .bin are not read, and the refusal says to convert them."""
    folder = make_head(tmp_path / "head", base)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

    with pytest.raises(InvalidRequest, match="may hold code: convert them to safetensors"):
        open_with(base, folder)


def test_its_memory_is_accounted(base: Path, tmp_path: Path) -> None:
    """The weights of the engine include the head's, its pages are drafts, and too few bytes are refused with the least."""
    head = make_head(tmp_path / "head", base)
    plain = build_engine(
        EngineConfig(base, dtype="float32", device_bytes=4 * 2**20, page_tokens=4), lambda _: FolderSource({}, {})
    )
    drafted = open_with(base, head, draft_kv_bytes=10_000)

    tensors = load_file(head / "model.safetensors").values()
    assert drafted.memory.weights_bytes - plain.memory.weights_bytes == sum(one.nbytes for one in tensors)
    page = 4 * 4 * (2 * 2 * 12 + 32)  # four tokens in fp32: keys and values of two heads of 12, and 32 features
    num_pages = 10_000 // page
    assert drafted.memory.draft_kv is not None
    assert drafted.memory.draft_kv.nbytes == (num_pages + 2) * page
    with pytest.raises(InvalidRequest, match=f"give at least {page} bytes"):
        open_with(base, head, draft_kv_bytes=100)
