"""Tests of reading model folders, in the shapes in which models are published."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import graftwork.demo
from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import InvalidRequest, ValidationFailed
from graftwork.sessions.text.messages import Message
from graftwork.sessions.text.model_files import ModelFolder
from tests.sessions.tokenizer_and_templates import CHATML, token_id, tokenizer_json

DEMO = Path(next(iter(graftwork.demo.__path__))) / "model"
USER = Message("user", "What is the weather in Oslo?")


def write(path: Path, **contents: Any) -> Path:
    """A folder with config.json and tokenizer.json, and further files by their stems; None leaves one out."""
    files = {"config": {"max_position_embeddings": 64}, "tokenizer": json.loads(tokenizer_json())} | contents
    for stem, content in files.items():
        if content is not None:
            (path / f"{stem}.json").write_text(json.dumps(content))
    return path


def test_folder_is_read(tmp_path: Path) -> None:
    """Names, context, special tokens and stop tokens come from the files that hold them."""
    end, pad = token_id("<|im_end|>"), token_id("<|endoftext|>")
    write(
        tmp_path,
        config={"max_position_embeddings": 64, "eos_token_id": end},
        generation_config={"eos_token_id": [pad, end]},
        tokenizer_config={"eos_token": {"content": "<|im_end|>"}, "pad_token": "<|endoftext|>", "bos_token": None},
    )

    folder = ModelFolder.load(tmp_path)

    assert (folder.name, folder.context_tokens) == (tmp_path.name, 64)
    assert folder.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert folder.eos_token_ids == (pad, end)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"eos_token": "<|im_end|>", "chat_template": CHATML}},
        {"tokenizer_config": {"eos_token": "<|im_end|>"}, "chat_template": {"chat_template": CHATML}},
        {
            "tokenizer_config": {
                "eos_token": "<|im_end|>",
                "chat_template": [{"name": "rag", "template": "?"}, {"name": "default", "template": CHATML}],
            }
        },
    ],
)
def test_older_places_of_the_template_are_known(tmp_path: Path, files: dict[str, Any]) -> None:
    """A template is found in the tokenizer's configuration, alone or among others, and in a JSON file."""
    assert ModelFolder.load(write(tmp_path, **files)).chat_template_source == CHATML


def test_template_file_goes_first(tmp_path: Path) -> None:
    """chat_template.jinja is preferred to the older places."""
    write(tmp_path, tokenizer_config={"chat_template": "old"})
    (tmp_path / "chat_template.jinja").write_text("new {{ messages[0].content }}")

    template = ModelFolder.load(tmp_path).chat_template(ManualClock())

    assert template.render((Message("user", "Hi"),)) == "new Hi"


def test_model_without_template_cannot_chat(tmp_path: Path) -> None:
    """A model without a chat template loads; asking for its prompt encoder is refused."""
    folder = ModelFolder.load(write(tmp_path))

    with pytest.raises(InvalidRequest, match="completions"):
        folder.prompt_encoder(ManualClock())


@pytest.mark.parametrize(
    ("files", "param"),
    [
        ({"config": None}, "config.json"),
        ({"config": {}}, "config.json"),
        ({"config": []}, "config.json"),
        ({"tokenizer": None}, "tokenizer.json"),
        ({"tokenizer": {}}, "tokenizer.json"),
        ({"generation_config": 3}, "generation_config.json"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, files: dict[str, Any], param: str) -> None:
    """A folder that cannot be served fails validation naming the file."""
    with pytest.raises(ValidationFailed) as raised:
        ModelFolder.load(write(tmp_path, **files))

    assert raised.value.param == param


def test_demo_model_prompts_as_transformers() -> None:
    """The shipped model's prompts are those of transformers, with tools and results."""
    reference: Any = AutoTokenizer.from_pretrained(DEMO)
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
    messages = [Message("system", "Be brief."), USER, Message("assistant", "Fine."), Message("user", "Größe? 🙂")]

    token_ids = ModelFolder.load(DEMO).prompt_encoder(ManualClock()).encode_messages(messages, tools)

    assert list(token_ids) == reference.apply_chat_template(
        [message.template_dict() for message in messages], tools=tools, add_generation_prompt=True, return_dict=False
    )


def test_demo_model_goes_on_from_stored_tokens() -> None:
    """With the shipped template, prompt, answer and delta join to the prompt of the whole conversation."""
    folder = ModelFolder.load(DEMO)
    encoder = folder.prompt_encoder(ManualClock())
    answer, new = Message("assistant", "Sunny."), (Message("user", "And in Bergen?"),)
    said = folder.tokenizer.encode("Sunny.<|im_end|>", allow_special=True)

    joined = encoder.encode_messages((USER,)) + said + encoder.encode_delta(answer, new, closed=True)

    assert encoder.ends_turn(said)
    assert joined == encoder.encode_messages((USER, answer, *new))


def sized(missing: int) -> dict[str, Any]:
    """A config.json whose embedding has the tokens of the vocabulary but the last `missing`, and no added ones."""
    rows = len(json.loads(tokenizer_json())["model"]["vocab"]) - missing
    return {"max_position_embeddings": 64, "vocab_size": rows}


@pytest.mark.parametrize(
    ("missing", "files", "told"),
    [
        (2, {}, "2 tokens that the model's embedding"),
        (0, {"tokenizer_config": {"eos_token": "<|im_end|>"}}, "'<|im_end|>'"),
        (0, {"tokenizer_config": {"chat_template": "{{ messages }}<|im_end|>"}}, "'<|im_end|>'"),
    ],
)
def test_a_tokenizer_with_more_tokens_than_the_embedding_is_refused(
    tmp_path: Path, missing: int, files: dict[str, Any], told: str
) -> None:
    """A token of the vocabulary beyond the embedding is refused, and so is an added one that the model's texts use."""
    with pytest.raises(ValidationFailed, match=re.escape(told)):
        ModelFolder.load(write(tmp_path, config=sized(missing), **files))


def test_an_added_token_that_nothing_uses_may_lie_beyond_the_embedding(tmp_path: Path) -> None:
    """Text models are published with tokenizers that also have a token for images."""
    folder = ModelFolder.load(write(tmp_path, config=sized(0)))

    assert folder.tokenizer.vocab_size > sized(0)["vocab_size"]
