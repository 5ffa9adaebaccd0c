"""What every object and every chunk of one OpenAI-compatible answer says alike."""

from dataclasses import dataclass
from typing import Any

from graftwork.api.deps.resources import InferenceResources
from graftwork.api.inference.request import InferenceRequest


@dataclass(frozen=True, slots=True)
class ResponseHead:
    answer_id: str
    created: int
    model: str
    """As it was asked for."""
    system_fingerprint: str
    """Of the weights that answered: the adapter version's, or the base model's."""
    service_tier: str
    """That was served, which may be lower than was asked for."""

    @classmethod
    def of(cls, prefix: str, inference: InferenceRequest, resources: InferenceResources) -> "ResponseHead":
        """`prefix` makes the answer's id out of the request's: `chatcmpl-`, `cmpl-`."""
        digest = inference.resolved.digest or resources.description.fingerprint
        return cls(
            answer_id=prefix + inference.request_id.removeprefix("req_"),
            created=int(resources.clock.now()),
            model=inference.resolved.requested,
            system_fingerprint="fp_" + digest.removeprefix("sha256:")[:12],
            service_tier=inference.tier,
        )

    def fields(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "service_tier": self.service_tier,
            "system_fingerprint": self.system_fingerprint,
        }
