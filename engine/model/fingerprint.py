"""The files of a model folder, and their fingerprint by content.

Owns what counts as the model: config.json and the weight files. Never imports torch, because the gateway reads it too.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from graftwork.platform.errors import InvalidRequest


def fingerprint(folder: Path) -> str:
    """`sha256:…` over config.json and all weight files. It depends on their bytes, not on their place."""
    digest = hashlib.sha256(b"graftwork/base/1")
    for path in [folder / "config.json", *weight_files(folder)]:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return f"sha256:{digest.hexdigest()}"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files in the index, or all in the folder without one. Raises InvalidRequest if one is missing."""
    files = sorted(_indexed_files(folder)) or sorted(folder.glob("*.safetensors"))
    missing = [path.name for path in files if not path.exists()]
    if missing or not files:
        wanted = ", ".join(missing) or "*.safetensors"
        raise InvalidRequest(f"{folder} has no {wanted}: --model must name a Hugging Face folder.", param="model")
    return files


def _indexed_files(folder: Path) -> Iterator[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        yield from {folder / name for name in names}
