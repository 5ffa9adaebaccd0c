"""Engines over the demo's model and adapters, and agent conversations with tools."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from graftwork.adapters.format.identity import identify_adapter
from graftwork.adapters.inspection.adapter_files import AdapterFiles
from graftwork.adapters.registry.artifact_store import CONFIG_NAME, WEIGHTS_NAME, LocalArtifacts
from graftwork.adapters.registry.weights import ArtifactAdapterSource
from graftwork.demo.tasks import held_out_cases
from graftwork.engine.build.engine import build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.stats import EngineDescription
from graftwork.engine.lora.weights import AdapterSource
from tests.engine.engine_driver import EngineDriver
from tests.engine.tagged_kv_cache import load_always

DEMO = Path(__file__).parents[2] / "demo"
JOBS = ("base", "pirate", "helpdesk", "terse")
PAGE = 16
PAGE_BYTES = 2 * 6 * PAGE * 64 * 4
"""Bytes of one page in fp32: keys and values of six layers, with two heads of 32."""
CONTEXT_PAGES = 2048 // PAGE


@dataclass
class DemoEngines:
    """Makes engines over the demo's model. `digests` has the adapters by job once an engine was made."""

    root: Path

    def __post_init__(self) -> None:
        self.digests: dict[str, str | None] = {"base": None}

    def engine(self, *, measures: bool = False, **options: Any) -> EngineDriver:
        """A new engine. Unless it `measures` its costs, it loads whatever it can."""
        settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "device_bytes": 64 * 2**20} | options
        config = EngineConfig(model=DEMO / "model", page_tokens=PAGE, **settings)
        return EngineDriver(build_engine(config, self.source, costs=None if measures else load_always()))

    def source(self, description: EngineDescription) -> AdapterSource:
        store = LocalArtifacts(self.root)
        for job in JOBS[1:]:
            folder = DEMO / "adapters" / job
            config, weights = (folder / CONFIG_NAME).read_bytes(), (folder / WEIGHTS_NAME).read_bytes()
            _, digest = identify_adapter(config, weights, description)
            with (folder / WEIGHTS_NAME).open("rb") as file:
                store.put(digest, AdapterFiles(config, file))
            self.digests[job] = digest
        return ArtifactAdapterSource(LocalArtifacts(self.root), description)

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(DEMO / "model")

    def prompts(self, job: str, count: int, at_least: int = 64) -> Iterator[list[int]]:
        """Prompts of a job with its tools, up to the assistant's turn."""
        for case in held_out_cases(job, 40 * count, seed=4):
            prompt: list[int] = self.tokenizer.apply_chat_template(
                case.messages, tools=case.tools or None, add_generation_prompt=True, return_dict=False
            )
            if len(prompt) >= at_least and count:
                count -= 1
                yield prompt

    def tool_result(self, number: int) -> list[int]:
        """The tokens after a call: its result, and the start of the assistant's turn."""
        text = f'<|im_end|>\n<|im_start|>user\n<tool_response>\n{{"order": {number}, "status": "shipped"}}'
        ids: list[int] = self.tokenizer.encode(text + "\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
        return ids
