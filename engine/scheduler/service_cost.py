"""Prices what a request takes of the engine, in one unit for all resources.

Owns the prices. Never decides who is served next: a WaitingOrder does, with these costs.

The unit of cost is the computation of one uncached prompt token. A step that generates a token reads all weights for few
tokens, so a generated token costs more.
"""

from dataclasses import dataclass

from graftwork.platform.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ServiceUse:
    """What a request has taken of the engine since it was charged last."""

    input_tokens: int = 0
    """Prompt tokens that were not cached, and had to be computed."""
    output_tokens: int = 0
    """Generated tokens."""
    rejected_drafts: int = 0
    """Draft tokens that a step verified and rejected."""
    page_seconds: float = 0.0
    """Device pages of KV, multiplied by the seconds for which the request held them."""
    adapter_bytes: int = 0
    """Bytes of adapter weights that were copied to the device for the request."""


@dataclass(frozen=True, slots=True)
class ServicePrices:
    """The price of each resource, in prompt tokens. None is negative."""

    input_token: float = 1.0
    output_token: float = 2.0
    """Twice a prompt token, as in the evaluation of VTC."""
    rejected_draft: float = 1.0
    """A rejected draft token is a row of a step that is computed anyway, as a prompt token is."""
    page_second: float = 0.0
    """0 by default: how much memory is worth depends on the model and the device. With a device of P pages that
    computes R prompt tokens a second, a price of R / P makes holding all memory as dear as using all computation.
    """
    adapter_megabyte: float = 0.0
    """For 10**6 bytes of adapter weights that are copied to the device."""

    def __post_init__(self) -> None:
        """Raises InvalidRequest if a price is negative or not finite, or if prompt or output tokens are free."""
        for name in self.__slots__:
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidRequest(f"The price {name} must be a number of at least 0.", param=name)
        if not (self.input_token and self.output_token):
            raise InvalidRequest("The prices input_token and output_token must be above 0.", param="input_token")

    def cost(self, use: ServiceUse) -> float:
        """Returns the cost of `use`, in uncached prompt tokens."""
        return (
            self.input_token * use.input_tokens
            + self.output_token * use.output_tokens
            + self.rejected_draft * use.rejected_drafts
            + self.page_second * use.page_seconds
            + self.adapter_megabyte * use.adapter_bytes / 1e6
        )
