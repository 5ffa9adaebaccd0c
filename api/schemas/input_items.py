"""Describes the items in the input of a response or of a conversation, for the OpenAPI document.

Never checks a request: `sessions/responses/input.py` does. See shapes.py, whose invariant holds here too.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from graftwork.api.schemas.shapes import ContentParts, DocumentedAs, InputRole, Shape, given
from graftwork.sessions.responses.input import MAX_CALL_ID_CHARACTERS

CallId = Annotated[str, Field(min_length=1, max_length=MAX_CALL_ID_CHARACTERS)]


class InputMessage(Shape):
    """A message in the input of a response, or in a conversation."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"role": "user", "content": "How is the weather?"}]})

    type: Literal["message"] | None = "message"
    role: InputRole
    content: str | Annotated[ContentParts, Field(min_length=1)]


class FunctionCallItem(Shape):
    """A tool call that the model made earlier."""

    type: Literal["function_call"]
    call_id: CallId
    name: str
    """The tool's name."""
    arguments: str
    """The arguments as JSON text."""
    namespace: str | None = None
    """The namespace of the tool."""


class CustomToolCallItem(Shape):
    """A call of a custom tool that the model made earlier."""

    type: Literal["custom_tool_call"]
    call_id: CallId
    name: str
    """The tool's name."""
    input: str
    """The text that the call gives to the tool."""
    namespace: str | None = None
    """The namespace of the tool."""


class LocalShellAction(Shape):
    """What a call of OpenAI's tool for a shell asks for. The model sees all fields."""

    command: Any = None
    """The command and its arguments."""


class LocalShellCallItem(Shape):
    """A call of OpenAI's tool for a shell in an earlier answer. The model sees a call of the function `local_shell`."""

    type: Literal["local_shell_call"]
    call_id: CallId
    action: LocalShellAction
    """What the call asks for, such as the command."""


class LocalShellCallOutputItem(Shape):
    """The output of a call of OpenAI's tool for a shell. It names the call in `call_id` or `id`."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [given("call_id"), given("id")]})

    type: Literal["local_shell_call_output"]
    call_id: CallId | None = None
    """The id of the call."""
    id: Any = None
    """The id of the call, if there is no `call_id`."""
    output: Annotated[Any, Field(json_schema_extra={"not": {"type": "null"}})]
    """A text or a list of text parts. Other JSON, except null, becomes JSON text."""


class IgnoredItem(Shape):
    """An item that the server leaves out: thoughts of another model, or a call of a tool that OpenAI runs.

    A header of the answer names such items.
    """

    type: Literal["reasoning", "web_search_call", "file_search_call", "image_generation_call"]


class FunctionCallOutputItem(Shape):
    """The output of a tool call that the model made earlier."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"type": "function_call_output", "call_id": "call_1", "output": "sunny"}]}
    )

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: CallId
    output: Annotated[Any, Field(json_schema_extra={"not": {"type": "null"}})]
    """A text or a list of text parts. Other JSON, except null, becomes JSON text."""


class ItemReferenceParam(Shape):
    """A stored item of an earlier response, by its id. The server puts a copy of the item in this place."""

    type: Literal["item_reference"]
    id: str
    """The id of the item, as the earlier answer had it."""


InputItemJson = Annotated[
    Any,
    DocumentedAs(
        InputMessage
        | FunctionCallItem
        | FunctionCallOutputItem
        | CustomToolCallItem
        | LocalShellCallItem
        | LocalShellCallOutputItem
        | ItemReferenceParam
        | IgnoredItem
    ),
]
