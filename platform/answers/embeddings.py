"""Defines the JSON answer of `/v1/embeddings`, in OpenAI's form."""

import base64
import struct
from typing import Literal

from graftwork.platform.answers.base import Answer
from graftwork.platform.answers.usage import Usage


class Embedding(Answer):
    """The embedding of one input."""

    object: Literal["embedding"] = "embedding"
    index: int
    """The input's place in the request, from 0."""
    embedding: tuple[float, ...] | str
    """Numbers, or with `encoding_format` base64 the bytes of little-endian float32 numbers as base64 text."""

    @property
    def vector(self) -> tuple[float, ...]:
        """The numbers, whatever form they were sent in."""
        if not isinstance(self.embedding, str):
            return self.embedding
        data = base64.b64decode(self.embedding)
        return struct.unpack(f"<{len(data) // 4}f", data)


class EmbeddingList(Answer):
    """The embeddings of all inputs, in their order."""

    object: Literal["list"] = "list"
    data: tuple[Embedding, ...]
    model: str
    service_tier: str
    usage: Usage
