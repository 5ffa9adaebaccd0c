"""Finds the model that the settings select, and the demo model and adapters that come with Graftwork.

Never reads a model's files.
"""

from importlib.resources import files
from pathlib import Path

from graftwork.platform.errors import InvalidRequest
from graftwork.platform.settings import Settings

DEMO_MODEL_NAME = "graftwork-demo"


def demo_folder() -> Path:
    return Path(str(files("graftwork.demo").joinpath("model"))).parent


def model_folder(settings: Settings) -> Path:
    """Returns the folder of the model in the settings. If the settings have no model, demo mode uses the demo model.

    Raises InvalidRequest if the settings have no model and demo mode is off.
    """
    if settings.model is not None:
        return settings.model
    if settings.demo:
        return demo_folder() / "model"
    raise InvalidRequest("No model is given: name its folder with --model, or serve the shipped one with --demo.")


def model_name(settings: Settings) -> str:
    """Returns the name that clients use for the base model. If the name is empty, the engine uses the folder's name."""
    return DEMO_MODEL_NAME if settings.demo and settings.model is None else ""


def model_dtype(settings: Settings) -> str:
    """Returns the dtype of the served model, such as "float32".

    In demo mode, `auto` means float32, because the demo model is small.
    """
    return "float32" if settings.demo and settings.dtype == "auto" else settings.dtype
