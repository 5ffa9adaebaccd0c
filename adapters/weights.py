"""Artifacts as the engine's matrices: the one place where an adapter's files become tensors.

Owns the last check before weights are used: what was read must still be what its digest names.
"""

from pathlib import Path

import torch

from graftwork.adapters.artifact_store import ArtifactPaths, ArtifactStore, LocalArtifacts
from graftwork.adapters.checkpoint import AdapterSpec
from graftwork.adapters.identity import identify_adapter
from graftwork.adapters.safetensors_file import TensorEntry
from graftwork.engine.adapter_weights import AdapterWeights, LoraPair
from graftwork.engine.request import EngineDescription
from graftwork.platform.errors import CapacityAbsent, NotFound, ValidationFailed

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class ArtifactAdapterSource:
    """The engine's `AdapterSource` over a folder of artifacts."""

    def __init__(self, root: Path, description: EngineDescription) -> None:
        self._artifacts: ArtifactStore = LocalArtifacts(root)
        self._description = description

    def load(self, digest: str) -> AdapterWeights:
        """Read, verify and build from the same bytes, so that a file swapped in between changes nothing.

        Raises NotFound without an artifact, ValidationFailed if its bytes no longer match `digest`.
        """
        config, weights = _read(digest, self._artifacts.open(digest))
        spec = _verify(digest, config, weights, self._description)
        pairs = {
            (module.layer, module.target): LoraPair(
                A=_tensor(module.A, weights),  # [rank, in_features]
                B=_tensor(module.B, weights),  # [out_features, rank]
                scale=module.scale,
            )
            for module in spec.modules
        }
        return AdapterWeights(digest, pairs)


def _read(digest: str, paths: ArtifactPaths) -> tuple[bytes, bytes]:
    try:
        return paths.config.read_bytes(), paths.weights.read_bytes()
    except FileNotFoundError:
        raise NotFound(f"The adapter artifact {digest} is gone.", param="digest", code="artifact_not_found") from None
    except OSError as error:
        message = f"The adapter artifact {digest} cannot be read ({error.strerror})."
        raise CapacityAbsent(message, code="artifact_store_unavailable") from error


def _verify(digest: str, config: bytes, weights: bytes, description: EngineDescription) -> AdapterSpec:
    try:
        spec, found = identify_adapter(config, weights, description)
    except ValidationFailed as error:
        raise _damaged(digest, error.message) from error
    if found != digest:
        raise _damaged(digest, f"they are {found}")
    return spec


def _damaged(digest: str, finding: str) -> ValidationFailed:
    message = (
        f"The stored files of adapter {digest} are not that adapter of this base model ({finding}). "
        "They were changed since the upload, or the base was: delete the version and upload it again."
    )
    return ValidationFailed(message, param=digest, code="artifact_damaged")


def _tensor(entry: TensorEntry, weights: bytes) -> torch.Tensor:
    """A copy: the file may hold a tensor at any offset, and the whole file need not stay in memory."""
    bits = torch.from_numpy(entry.bits(weights).copy())
    return bits.view(_DTYPES[entry.dtype]).reshape(entry.shape)
