"""Checks an adapter folder against a model folder, with the server's own checks, for `graftwork adapters verify`.

Never connects to a server, and never loads weights of the base model.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graftwork.adapters.format.gguf_adapter import peft_files
from graftwork.adapters.format.identity import identify_adapter
from graftwork.api.server.served_model import model_folder, model_name
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.stats import EngineDescription
from graftwork.engine.model.config import read_model_config
from graftwork.engine.model.fingerprint import fingerprint
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.settings.settings import Settings

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """Facts about an adapter that passed all checks, such as the name of the base model, the rank and the size."""

    model_name: str
    model_folder: Path
    rank: int
    target_modules: tuple[str, ...]
    num_modules: int
    size_bytes: int
    digest: str

    def body(self) -> dict[str, Any]:
        return {"ok": True, **asdict(self), "model_folder": str(self.model_folder)}


def check_adapter(path: Path, settings: Settings) -> AdapterReport:
    """Checks whether the adapter in a PEFT folder, or in a GGUF file, fits the base model that the settings select.

    Raises ValidationFailed, which names the wrong tensor or field.
    Raises InvalidRequest if a file is missing, or if the settings select no model.
    """
    model = model_folder(settings)
    description = describe_model(model, model_name(settings))
    if path.is_file():
        content = _read(path)
        files = peft_files(content, description)
        config, weights = files.config, b"".join(files.weights(content))
    else:
        config, weights = _read(path / CONFIG_FILE), _read(path / WEIGHTS_FILE)
    spec, digest = identify_adapter(config, weights, description)
    return AdapterReport(
        model_name=description.model_name,
        model_folder=model.resolve(),
        rank=spec.rank,
        target_modules=spec.target_modules,
        num_modules=len(spec.modules),
        size_bytes=len(weights),
        digest=digest,
    )


def describe_model(folder: Path, name: str = "") -> EngineDescription:
    """Returns the description that an engine would send for the model in `folder`. Reads only the model's files.

    If `name` is empty, the model has the folder's name.
    """
    model, engine = read_model_config(folder), EngineConfig(folder)
    return EngineDescription(
        model_name=name or folder.resolve().name,
        fingerprint=fingerprint(folder),
        vocab_size=model.vocab_size,
        context_tokens=model.context_tokens,
        eos_token_ids=model.eos_token_ids,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        biased_targets=model.biased_targets,
        target_shapes=model.target_shapes,
        max_lora_rank=engine.max_lora_rank,
        page_tokens=engine.page_tokens or model.page_tokens,
        device_pages=0,
        experts=None if model.experts is None else model.experts.shapes,
        modules=model.modules,
        head_dim=model.head_dim,
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}.", param=path.name) from error
