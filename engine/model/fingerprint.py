"""Lists the files of a model, and computes a fingerprint of their content.

Owns which files make up a model: config.json and the weight files. Never imports torch, because the gateway computes
fingerprints too.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from graftwork.platform.errors import InvalidRequest


def fingerprint(folder: Path, rounding: str | None = None) -> str:
    """Returns `sha256:…`, a digest of the content of config.json and of all weight files.

    Equal models in different folders have the same fingerprint. Weights that are rounded when they are loaded make
    another model: `rounding` names to what, such as "int8". Raises InvalidRequest if a file is missing or cannot be
    read.
    """
    digest = hashlib.sha256(b"graftwork/base/1")
    for path in [folder / "config.json", *weight_files(folder)]:
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise InvalidRequest(f"{path} cannot be read: {error.strerror}.", param="model") from error
    if rounding is not None:
        digest.update(f"rounded to {rounding}".encode())
    return f"sha256:{digest.hexdigest()}"


def weight_files(folder: Path) -> list[Path]:
    """Returns the paths of the model's safetensors files.

    These are the files that the model's index file lists. If there is no index file, they are all safetensors files in
    the folder. Raises InvalidRequest if a file is missing.
    """
    files = sorted(_indexed_files(folder)) or sorted(folder.glob("*.safetensors"))
    missing = [path.name for path in files if not path.exists()]
    if missing or not files:
        wanted = ", ".join(missing) or "*.safetensors"
        raise InvalidRequest(f"{folder} has no {wanted}: --model must name a Hugging Face folder.", param="model")
    return files


def _indexed_files(folder: Path) -> Iterator[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            yield from [folder / name for name in names]
        except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"{index} is no index of weight files ({error}): download it again.", param="model"
            ) from error
