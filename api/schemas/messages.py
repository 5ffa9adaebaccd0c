"""Chat messages on the wire: only their outer shape; `sessions/messages.py` reads what is in them."""

from typing import Annotated, Any

from pydantic import Field

MessageList = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=4096)]
"""OpenAI's chat messages, oldest first."""
