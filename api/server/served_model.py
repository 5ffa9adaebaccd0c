"""Finds the model that the settings select, and the demo model and adapters that come with Graftwork.

Never reads a model's files; `model_sources.py` fetches them.
"""

import re
from importlib.resources import files
from pathlib import Path

from graftwork.platform.errors import InvalidRequest
from graftwork.platform.settings.settings import Settings
from graftwork.platform.settings.values import ModelReference

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")

DEMO_MODEL_NAME = "graftwork-demo"


def demo_folder() -> Path:
    return Path(str(files("graftwork.demo").joinpath("model"))).parent


def model_folder(settings: Settings, *, with_weights: bool = True) -> Path:
    """Returns the folder of the model in the settings. If the settings have no model, demo mode uses the demo model.

    A model from the Hub or a bucket is fetched first, if this machine lacks it; a gateway needs it without its weights.
    Raises InvalidRequest if the settings have no model and demo mode is off, or if there is no such model, and Unavailable
    if it cannot be fetched now.
    """
    if isinstance(settings.model, ModelReference):
        return _fetched(settings.model, settings, with_weights=with_weights)
    if settings.model is not None:
        return _existing_folder(settings.model)
    if settings.demo:
        return demo_folder() / "model"
    raise InvalidRequest("No model is given: name its folder with --model, or serve the shipped one with --demo.")


def draft_model_folder(settings: Settings) -> Path | None:
    """Returns the folder of the draft model in the settings, which is fetched first as the model is; None without one.

    Raises InvalidRequest if there is no such model, and Unavailable if it cannot be fetched now.
    """
    if isinstance(settings.draft_model, ModelReference):
        return _fetched(settings.draft_model, settings)
    return None if settings.draft_model is None else _existing_folder(settings.draft_model, "draft_model")


def draft_head_folder(settings: Settings) -> Path | None:
    """Returns the folder of the draft head in the settings, as `draft_model_folder` does for a draft model."""
    if isinstance(settings.draft_head, ModelReference):
        return _fetched(settings.draft_head, settings)
    return None if settings.draft_head is None else _existing_folder(settings.draft_head, "draft_head")


def model_name(settings: Settings) -> str:
    """Returns the name that clients use for the base model. If the name is empty, the engine uses the folder's name."""
    if settings.served_model_name is not None:
        return settings.served_model_name
    if isinstance(settings.model, ModelReference):
        return settings.model.name
    return DEMO_MODEL_NAME if settings.demo and settings.model is None else ""


def shown_model_name(settings: Settings) -> str:
    """Returns the name that clients use for the base model, as engines say it."""
    return model_name(settings) or model_folder(settings).resolve().name


def model_dtype(settings: Settings) -> str:
    """Returns the dtype of the served model, such as "float32".

    In demo mode, `auto` means float32, because the demo model is small.
    """
    return "float32" if settings.demo and settings.dtype == "auto" else settings.dtype


def _fetched(reference: ModelReference, settings: Settings, *, with_weights: bool = True) -> Path:
    # Most models are folders, and what shows the progress of a fetch takes a tenth of a second to import.
    from graftwork.api.server.model_sources import fetched_model

    return fetched_model(reference, settings.data_dir, with_weights=with_weights)


def _existing_folder(path: Path, param: str = "model") -> Path:
    flag = f"--{param.replace('_', '-')}"
    if path.is_dir():
        return path
    if path.exists():
        raise InvalidRequest(f"{path} is a file: {flag} names the model's folder, with its config.json.", param=param)
    if _HUB_NAME.fullmatch(str(path)):
        raise InvalidRequest(
            f"There is no folder {path}. To fetch the model of this name from the Hugging Face Hub, give "
            f"{flag} hf:{path}@REVISION.",
            param=param,
        )
    raise InvalidRequest(f"There is no folder {path}: {flag} names a Hugging Face model's folder.", param=param)
