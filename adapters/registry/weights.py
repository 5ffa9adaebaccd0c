"""Makes the engine's tensors from the stored files of an adapter.

Owns the last check before the weights are used: the digest. Never checks the values for NaN, because the upload was
checked before it was stored.
Invariant: every tensor comes from file content that has the adapter's digest.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch

from graftwork.adapters.format.adapter_spec import (
    EMBEDDING,
    HEAD,
    INPUT_EMBEDDING,
    JOINED_EXPERTS,
    AdapterSpec,
    ExpertSpec,
    ModuleSpec,
)
from graftwork.adapters.format.identity import digest_behind, digest_prefix
from graftwork.adapters.format.layout import most_tensors, read_layout
from graftwork.adapters.format.safetensors_file import FORMATS, TensorEntry, header_of
from graftwork.adapters.registry.artifact_store import ArtifactPaths, ArtifactStore
from graftwork.engine.core.expert_shapes import ExpertShapes
from graftwork.engine.core.stats import EngineDescription
from graftwork.engine.lora.expert_factors import SingleFactors, joined_pair, stacked_pair
from graftwork.engine.lora.weights import AdapterWeights, ExpertPair, LoraPair
from graftwork.engine.model.projections import MODEL_LAYER
from graftwork.platform.errors import NotFound, Unavailable, ValidationFailed

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_KEPT_LAYOUTS = 64


@dataclass(frozen=True, slots=True)
class _Layout:
    """What is known about an adapter from its configuration and header.

    Adapters that differ only in values share it.
    """

    spec: AdapterSpec
    digest_prefix: bytes


class ArtifactAdapterSource:
    """Loads adapters for the engine from the store of adapter files. Implements the engine's `AdapterSource`."""

    def __init__(self, artifacts: ArtifactStore, description: EngineDescription) -> None:
        self._artifacts = artifacts
        self._description = description
        self._layouts: OrderedDict[tuple[bytes, bytes, int], _Layout] = OrderedDict()
        self._lock = Lock()

    def load(self, digest: str) -> AdapterWeights:
        """Reads the stored files of an adapter, checks that they have this digest, and returns their tensors.

        Each file is read once, so the check and the tensors use the same content. Most tensors are views of this
        content. Values are not checked for NaN, because the upload was checked. A local copy that is damaged or gone is
        fetched again, once. Raises NotFound if no files are stored
        under `digest`, ValidationFailed if the content has another digest, and Unavailable if the files cannot be read.
        """
        try:
            weights, spec = self._verified(digest)
        except (ValidationFailed, NotFound):
            if not self._artifacts.renew(digest):
                raise
            weights, spec = self._verified(digest)
        build = _Builder(torch.from_numpy(weights))
        pairs = {(module.layer, module.target): build.pair(module) for module in spec.modules}
        saved = {part.target: build.tensor(part.matrix) for part in spec.saved}
        return AdapterWeights(
            digest,
            {
                (MODEL_LAYER if layer is None else layer, target): pair
                for (layer, target), pair in pairs.items()
                if layer is not None or target not in (EMBEDDING, INPUT_EMBEDDING, HEAD)
            },
            biases={(part.layer, part.target): build.tensor(part.bias) for part in spec.biases},
            embedding=pairs.get((None, EMBEDDING)),
            input_embedding=pairs.get((None, INPUT_EMBEDDING)),
            head=pairs.get((None, HEAD)),
            saved_embedding=saved.get(EMBEDDING),
            saved_head=saved.get(HEAD),
            experts=build.experts(spec.experts, self._description.experts),
        )

    def _verified(self, digest: str) -> tuple[npt.NDArray[np.uint8], AdapterSpec]:
        """Returns the content of the weights file and what is in it."""
        config, weights = _read(digest, self._artifacts.open(digest))
        return weights, self._verify(digest, config, weights.data)

    def _verify(self, digest: str, config: bytes, weights: memoryview) -> AdapterSpec:
        try:
            layout = self._layout(config, weights)
        except ValidationFailed as error:
            raise _damaged(digest, error.message) from error
        found = digest_behind(layout.digest_prefix, layout.spec, weights)
        if found != digest:
            raise _damaged(digest, f"they are {found}")
        return layout.spec

    def _layout(self, config: bytes, weights: memoryview) -> _Layout:
        """Returns the layout, often from a cache.

        Many adapters have the same layout, and an evicted adapter is loaded again.
        """
        key = (config, header_of(weights, most_tensors(self._description)), len(weights))
        with self._lock:
            if key in self._layouts:
                self._layouts.move_to_end(key)
                return self._layouts[key]
        spec = read_layout(config, weights, self._description)
        layout = _Layout(spec, digest_prefix(spec, self._description.fingerprint))
        with self._lock:
            self._layouts[key] = layout
            if len(self._layouts) > _KEPT_LAYOUTS:
                self._layouts.popitem(last=False)
        return layout


class _Builder:
    """Makes tensors from the bytes of one weights file."""

    def __init__(self, content: torch.Tensor) -> None:
        """`content` is the whole file as a tensor of bytes, [file bytes], uint8."""
        self._content = content
        self._views: dict[str, torch.Tensor] = {}

    def pair(self, module: ModuleSpec) -> LoraPair:
        return LoraPair(
            A=self.tensor(module.A),  # [rank, in_features]
            B=self.tensor(module.B),  # [out_features, rank]
            scale=module.scale,
            magnitude=None if module.magnitude is None else self.tensor(module.magnitude),  # [out_features]
            bias=None if module.bias is None else self.tensor(module.bias),  # [out_features]
        )

    def experts(self, specs: Sequence[ExpertSpec], shapes: ExpertShapes | None) -> dict[tuple[int, str], ExpertPair]:
        """Returns the factors of experts by layer and group of projections."""
        if shapes is None:
            return {}
        pairs: dict[tuple[int, str], ExpertPair] = {}
        singles: dict[tuple[int, str], list[SingleFactors]] = {}
        for spec in specs:
            A, B = self.tensor(spec.A), self.tensor(spec.B)
            is_down = spec.target == JOINED_EXPERTS[1]
            if spec.expert is None:
                interleaves = shapes.interleaves and not is_down
                pair = joined_pair(A, B, spec.scale, shapes.num_experts, interleaves=interleaves)
                pairs[spec.layer, spec.target] = pair
                continue
            out_start = shapes.intermediate_size if spec.target == "experts_up" else 0
            group = JOINED_EXPERTS[1] if is_down else JOINED_EXPERTS[0]
            own = SingleFactors(spec.expert, A, B, spec.scale, out_start)
            singles.setdefault((spec.layer, group), []).append(own)
        for (layer, group), parts in singles.items():
            width = (shapes.down if group == JOINED_EXPERTS[1] else shapes.gate_up)[0]
            pairs[layer, group] = stacked_pair(parts, shapes.num_experts, width)
        return pairs

    def tensor(self, entry: TensorEntry) -> torch.Tensor:
        """Returns one tensor as a view of the file.

        Copies the tensor if its offset is not aligned, which safetensors allows.
        """
        item_bytes = FORMATS[entry.dtype].item_bytes
        if entry.start % item_bytes:
            return self._content[entry.start : entry.end].clone().view(_DTYPES[entry.dtype]).reshape(entry.shape)
        strides = (entry.shape[1], 1) if len(entry.shape) == 2 else (1,)
        return torch.as_strided(self._elements(entry.dtype), entry.shape, strides, entry.start // item_bytes)

    def _elements(self, dtype: str) -> torch.Tensor:
        """Returns the file as one row of elements of a dtype. Leaves out bytes at the end that fill no element."""
        if dtype not in self._views:
            item_bytes = FORMATS[dtype].item_bytes
            whole = len(self._content) // item_bytes * item_bytes
            self._views[dtype] = self._content[:whole].view(_DTYPES[dtype])
        return self._views[dtype]


def _read(digest: str, paths: ArtifactPaths) -> tuple[bytes, npt.NDArray[np.uint8]]:
    """Reads the two files of an artifact: the configuration and the weights.

    Nothing else refers to the returned memory.
    """
    try:
        with paths.weights.open("rb", buffering=0) as file:
            content = np.fromfile(file, dtype=np.uint8)
        return paths.config.read_bytes(), content
    except FileNotFoundError:
        raise NotFound(f"The adapter artifact {digest} is gone.", param="digest", code="artifact_not_found") from None
    except OSError as error:
        message = f"The adapter artifact {digest} cannot be read ({error.strerror})."
        raise Unavailable(message, code="artifact_store_unavailable") from error


def _damaged(digest: str, finding: str) -> ValidationFailed:
    message = (
        f"The stored files of adapter {digest} are not that adapter of this base model ({finding}). "
        "They were changed since the upload, or the base was: delete the version and upload it again."
    )
    return ValidationFailed(message, param=digest, code="artifact_damaged")
