"""Which token ids a model has: what a request names must be among them, or its rows would be read past their end."""

from collections.abc import Iterable, Mapping

from graftwork.engine.request import EngineRequest
from graftwork.platform.errors import InvalidRequest


def check_vocabulary(request: EngineRequest, vocab_size: int) -> None:
    """Raises InvalidRequest naming the field that holds an id which no token has."""
    sampling = request.sampling
    named: Mapping[str, Iterable[int]] = {
        "prompt": request.prompt_token_ids,
        "stop_token_ids": sampling.stop_token_ids,
        "logit_bias": (token_id for token_id, _ in sampling.logit_bias),
    }
    for param, token_ids in named.items():
        outside = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
        if outside is not None:
            message = f"Token id {outside} is outside the vocabulary of {vocab_size} tokens."
            raise InvalidRequest(message, param=param)
