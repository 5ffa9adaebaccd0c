"""Several adapters in one request, by weight."""

from typing import Annotated

from pydantic import Field

from graftwork.api.schemas.bodies import NativeBody
from graftwork.engine.request import MAX_MIXTURE, MAX_MIXTURE_WEIGHT


class MixturePart(NativeBody):
    """One adapter's part."""

    model: str
    """`name`, `name@3` or `name@alias`, as in `model`."""
    weight: Annotated[float, Field(ge=-MAX_MIXTURE_WEIGHT, le=MAX_MIXTURE_WEIGHT)] = 1.0


MixtureParts = Annotated[list[MixturePart], Field(min_length=1, max_length=MAX_MIXTURE)]
