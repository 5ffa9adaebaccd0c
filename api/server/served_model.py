"""The shipped model and adapters, and the model that a process serves."""

from importlib.resources import files
from pathlib import Path

from graftwork.platform.errors import InvalidRequest
from graftwork.platform.settings import Settings

DEMO_MODEL_NAME = "graftwork-demo"


def demo_folder() -> Path:
    return Path(str(files("graftwork.demo").joinpath("model"))).parent


def model_folder(settings: Settings) -> Path:
    """The model's folder: the given one, or in demo mode the shipped one. Raises InvalidRequest without either."""
    if settings.model is not None:
        return settings.model
    if settings.demo:
        return demo_folder() / "model"
    raise InvalidRequest("No model is given: name its folder with --model, or serve the shipped one with --demo.")


def model_name(settings: Settings) -> str:
    """The name of the base model for clients. Empty means the folder's name."""
    return DEMO_MODEL_NAME if settings.demo and settings.model is None else ""


def model_dtype(settings: Settings) -> str:
    """The dtype of the served model. The shipped model is small enough for fp32."""
    return "float32" if settings.demo and settings.dtype == "auto" else settings.dtype
