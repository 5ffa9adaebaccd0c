"""What a turn is made with: enough to know, long after, why its tokens are these.

Owns the shape that is stored with each turn. Digests name what was used; nothing of it is kept a second time.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from graftwork.engine.request import EngineDescription
from graftwork.sessions.generation import GenerationRequest
from graftwork.sessions.transcript import TurnEncoder


def made_with(request: GenerationRequest, encoder: TurnEncoder, description: EngineDescription) -> Mapping[str, Any]:
    """Weights, template, tokenizer and sampling of one turn. A null seed: the engine drew one and kept it."""
    version = request.resolved.version
    return {
        "base": description.fingerprint,
        "adapter": None if version is None else version.digest,
        "template": encoder.template_digest,
        "tokenizer": encoder.tokenizer_digest,
        "sampling": {**asdict(request.sampling), "stop": list(request.stop)},
    }
