"""Finds the model that the settings select, and the demo model and adapters that come with this program.

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

    Raises InvalidRequest without a model and without demo mode.
    """
    if settings.model is not None:
        return settings.model
    if settings.demo:
        return demo_folder() / "model"
    raise InvalidRequest("No model is given: name its folder with --model, or serve the shipped one with --demo.")


def model_name(settings: Settings) -> str:
    """Returns the name of the base model for clients. An empty name means the name of the model's folder."""
    return DEMO_MODEL_NAME if settings.demo and settings.model is None else ""


def model_dtype(settings: Settings) -> str:
    """Returns the dtype of the served model. The demo model is so small that it can be served in float32."""
    return "float32" if settings.demo and settings.dtype == "auto" else settings.dtype
