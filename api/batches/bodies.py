"""Defines the bodies of the routes that create batches.

Never reads a request inside a batch: the endpoint checks it when it is answered, so a wrong one fails alone.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from graftwork.api.anthropic.schemas import MessagesRequest
from graftwork.api.batches.endpoints import MESSAGES, OPENAI_ENDPOINTS
from graftwork.api.schemas.base import OpenAiBody
from graftwork.api.schemas.sessions import Metadata
from graftwork.api.schemas.shapes import DocumentedAs
from graftwork.platform.errors import InvalidRequest

MAX_MESSAGES = 10_000
"""The most requests of a batch of messages. They come as one JSON body, which is bounded too."""
_SHORTEST_S, _LONGEST_S = 3600, 2_592_000
_CUSTOM_ID = "^[a-zA-Z0-9_-]{1,64}$"
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class OutputLife(OpenAiBody):
    """When the output files of a batch expire."""

    anchor: Literal["created_at"]
    """The time from which the seconds count: the creation of the file."""
    seconds: Annotated[int, Field(ge=_SHORTEST_S, le=_LONGEST_S)]
    """The seconds after which a file expires. The server may delete it earlier, by its own setting."""


class BatchBody(OpenAiBody):
    """A batch of the requests in an uploaded file."""

    input_file_id: Annotated[str, Field(max_length=200)]
    """The id of a file that was uploaded with the purpose `batch`: one request in JSON a line."""
    endpoint: Annotated[str, Field(json_schema_extra={"enum": list(OPENAI_ENDPOINTS)})]
    """The path to which each line is a request."""
    completion_window: Literal["24h"]
    """The time in which the batch is worked on. Then it ends with what it has."""
    metadata: Metadata | None = None
    output_expires_after: OutputLife | None = None
    """When the output files expire. By default the server's own setting decides."""

    def checked_endpoint(self) -> str:
        """Returns the endpoint. Raises InvalidRequest if batches are not served there."""
        if self.endpoint not in OPENAI_ENDPOINTS:
            served = ", ".join(OPENAI_ENDPOINTS)
            raise InvalidRequest(f"endpoint: batches are served at {served}.", param="endpoint")
        return self.endpoint


class MessageBatchRequest(OpenAiBody):
    """One request of a batch of messages."""

    custom_id: Annotated[str, Field(pattern=_CUSTOM_ID)]
    """The client's own id of this request, which its result has too. Each request of a batch has another one."""
    params: Annotated[dict[str, Any], DocumentedAs(MessagesRequest)]
    """The body of a request to `/v1/messages`. If it is wrong, this request alone fails."""


class MessageBatchBody(OpenAiBody):
    """A batch of requests to `/v1/messages`."""

    requests: Annotated[list[MessageBatchRequest], Field(min_length=1, max_length=MAX_MESSAGES)]
    """The requests. They run in any order."""

    def lines(self) -> Iterator[bytes]:
        """Yields each request as a line of an input file. Raises InvalidRequest for a custom_id that occurs twice."""
        known = set[str]()
        for index, request in enumerate(self.requests):
            if request.custom_id in known:
                param = f"requests[{index}].custom_id"
                raise InvalidRequest(f"{param}: another request has this custom_id too.", param=param)
            known.add(request.custom_id)
            line = {"custom_id": request.custom_id, "method": "POST", "url": MESSAGES, "body": request.params}
            yield _encode(line).encode()
