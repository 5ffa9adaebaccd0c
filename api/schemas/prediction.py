"""OpenAI's `prediction`: what the client expects the answer to be, such as the file that it asks to have edited."""

from typing import Annotated, Literal

from pydantic import Field

from graftwork.api.schemas.bodies import OpenAiBody


class PredictionPart(OpenAiBody):
    """A piece of the expected text."""

    type: Literal["text"]
    text: str


class Prediction(OpenAiBody):
    """Drafted from and verified: it makes a right guess faster, and changes no answer."""

    type: Literal["content"]
    content: str | Annotated[list[PredictionPart], Field(min_length=1)]

    @property
    def text(self) -> str:
        """All of it; parts are joined as they stand."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
