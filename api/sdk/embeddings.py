"""Defines `client.embeddings`, with the names of OpenAI's SDK."""

from collections.abc import Sequence
from typing import Any, Literal, TypedDict, Unpack

from graftwork.api.sdk.transport.effects import Call, Steps, deadline_header
from graftwork.api.sdk.transport.operation import R, Resource, operation
from graftwork.platform.answers.embeddings import EmbeddingList


class EmbeddingParameters(TypedDict, total=False):
    """The parameters of a request for embeddings besides `model` and `input`."""

    encoding_format: Literal["float", "base64"]
    """base64 is shorter; `Embedding.vector` reads both."""
    dimensions: int
    pooling: Literal["last", "mean"]
    normalize: bool
    add_special_tokens: bool
    adapters: list[dict[str, Any]]
    service_tier: str
    user: str
    deadline_ms: int
    """Milliseconds in which the first embedding must come. If the server expects a later one, it refuses the request."""


class Embeddings(Resource[R]):
    """Embeds texts with the base model or an adapter. Sends `POST /v1/embeddings`."""

    @operation
    def create(
        self,
        *,
        model: str,
        input: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        **parameters: Unpack[EmbeddingParameters],
    ) -> Steps[EmbeddingList]:
        """Embeds one text or several. The vectors are in the order of the texts."""
        headers = deadline_header(parameters.pop("deadline_ms", None))
        body = {"model": model, "input": input if isinstance(input, str) else list(input), **parameters}
        return (yield from self._read(EmbeddingList, Call("POST", "/v1/embeddings", json=body, headers=headers)))
