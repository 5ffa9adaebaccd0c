"""Graftwork's engine over the yardstick's files, as both the yardstick and the profile of a step run it."""

from pathlib import Path

from graftwork.adapters.format.identity import identify_adapter
from graftwork.adapters.inspection.adapter_files import AdapterFiles
from graftwork.adapters.registry.artifact_store import CONFIG_NAME, WEIGHTS_NAME, LocalArtifacts
from graftwork.adapters.registry.weights import ArtifactAdapterSource
from graftwork.engine.build.devices import keep_freed_memory
from graftwork.engine.build.engine import Engine, build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.requests import AdapterUse, EngineRequest
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.stats import EngineDescription
from graftwork.engine.lora.weights import AdapterSource
from graftwork.platform.ids import IsolationDomain, RequestId, new_id

MAX_BATCH_TOKENS = 2048
"""Tokens of one step: what the peers have, too."""


class YardstickArtifacts:
    """The adapters' files as artifacts; `digests` by adapter index is filled once the engine has read its model."""

    def __init__(self, folders: list[Path], root: Path) -> None:
        self.digests: list[str] = []
        self._folders = folders
        self._root = root

    def source(self, description: EngineDescription) -> AdapterSource:
        """The engine's `SourceFor`."""
        store = LocalArtifacts(self._root)
        for folder in self._folders:
            config, weights = (folder / CONFIG_NAME).read_bytes(), (folder / WEIGHTS_NAME).read_bytes()
            _, digest = identify_adapter(config, weights, description)
            with (folder / WEIGHTS_NAME).open("rb") as file:
                store.put(digest, AdapterFiles(config, file))
            self.digests.append(digest)
        return ArtifactAdapterSource(LocalArtifacts(self._root), description)


def open_engine(
    base: Path, artifacts: YardstickArtifacts, dtype: str = "bfloat16", lora_kernels: str = "auto"
) -> Engine:
    """One thread, one step's prefill as large as the yardstick's largest."""
    config = EngineConfig(
        model=base,
        device="cpu",
        dtype=dtype,
        threads=1,
        lora_kernels=lora_kernels,
        max_batch_tokens=MAX_BATCH_TOKENS,
    )
    keep_freed_memory()  # as every engine process does
    return build_engine(config, artifacts.source)


def greedy_request(prompt: list[int], digest: str | None, output_tokens: int, domain: bytes) -> EngineRequest:
    """`domain` separates prefix caches: a fresh one means that nothing of the prompt is cached."""
    return EngineRequest(
        request_id=RequestId(new_id("req")),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True),
        domain=IsolationDomain(domain),
        adapters=(AdapterUse(digest),) if digest is not None else (),
    )
