"""Describes the fields of the OpenAPI document's schemas.

The description of a field is the docstring below the field in its class. If a field means the same in several bodies,
this module has the one description for all of them.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from graftwork.api.schemas.base import NativeBody, OpenAiBody
from graftwork.api.schemas.shapes import Shape
from graftwork.platform.answers.base import Answer

SHARED_FIELDS = {
    "model": "The base model's name, or an adapter as `name`, `name@3` or `name@alias`.",
    "messages": "The conversation, oldest message first.",
    "instructions": "The text of a system message before the conversation.",
    "input": "A user's message, or a list of items.",
    "stream": "If true, the server sends the answer as server-sent events while the model generates it.",
    "stream_options": "Options of a stream.",
    "n": "How many answers to generate for each prompt.",
    "tools": "The tools that the model may call.",
    "parallel_tool_calls": "If false, an answer has at most one tool call. The default is true.",
    "max_completion_tokens": "The most tokens to generate. It has priority over `max_tokens`.",
    "add_special_tokens": "If false, the tokenizer adds no special tokens, such as one for the beginning of the text.",
    "service_tier": "The priority of the request. It is at most the tenant's own.",
    "prediction": "Text that the client expects in the answer.",
    "metadata": "Texts that the server keeps for the client. They do not change the answers.",
    "cancel_on_disconnect": "If true, the turn stops when the client disconnects. By default it continues.",
    "call_id": "The id of the tool call.",
    "role": "Who wrote the message.",
    "content": "A text, or its parts.",
    "text": "The text itself.",
    "strict": "If true, the server refuses a schema that it cannot fully enforce.",
    "name": "A name of the client's choice.",
    "service_tier_ceiling": "The highest priority that the tenant's requests may have.",
}
"""Maps the name of a field that means the same in several bodies to its description.

If a class has a docstring for the field, that docstring is used instead.
"""


def describe_fields(schemas: Mapping[str, dict[str, Any]]) -> None:
    """Adds a description to each property of the schemas that has none. Changes `schemas` itself."""
    for model in _subclasses(Answer, NativeBody, OpenAiBody, Shape):
        properties = schemas.get(model.__name__, {}).get("properties", {})
        for base in model.__mro__:
            if base.__module__.startswith("graftwork."):
                _describe(properties, _field_docstrings(base))
        if not issubclass(model, Answer):
            _describe(properties, SHARED_FIELDS)


def _subclasses(*bases: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for base in bases:
        for model in base.__subclasses__():
            if not model.__pydantic_generic_metadata__["args"]:  # a page class has no source code
                yield model
                yield from _subclasses(model)


def _describe(properties: dict[str, Any], descriptions: Mapping[str, str]) -> None:
    for name, text in descriptions.items():
        if name in properties:
            properties[name].setdefault("description", text)


def _field_docstrings(model: type[Any]) -> dict[str, str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            found[field.target.id] = inspect.cleandoc(str(below.value.value))
    return found
