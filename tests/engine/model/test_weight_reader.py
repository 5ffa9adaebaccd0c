"""Reading model folders: what is refused, and what a fingerprint depends on."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from graftwork.engine.build.engine import build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.model.config import read_model_config
from graftwork.engine.model.fingerprint import fingerprint
from graftwork.platform.errors import InvalidRequest
from tests.engine.conftest import RandomModels

Edit = Callable[[dict[str, Any]], None]


def edited(base: Path, folder: Path, edit: Edit, name: str = "config.json") -> Path:
    """A copy of a model folder with one JSON file changed."""
    shutil.copytree(base, folder)
    content = json.loads((folder / name).read_text())
    edit(content)
    (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("damage", ["missing", "misshapen"])
def test_a_tensor_that_is_missing_or_misshapen_is_named(models: RandomModels, tmp_path: Path, damage: str) -> None:
    """The engine does not start, and names the tensor."""
    folder = tmp_path / "model"
    shutil.copytree(models.base, folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    wrong = tensors.pop(name)[:-1].contiguous()
    save_file(tensors | ({name: wrong} if damage == "misshapen" else {}), folder / "model.safetensors")

    with pytest.raises(InvalidRequest, match=name.replace(".", r"\.")):
        build_engine(EngineConfig(model=folder), lambda _: models.source)


def test_a_folder_without_weights_says_what_it_lacks(tmp_path: Path) -> None:
    """Without config.json or without weights, the error names what is missing."""
    with pytest.raises(InvalidRequest, match=r"config\.json"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="safetensors"):
        fingerprint(tmp_path)


def test_a_kv_budget_below_one_context_is_refused_with_the_bytes_that_are_needed(models: RandomModels) -> None:
    """Device memory that cannot hold one context is refused, with the bytes that are needed."""
    keys_and_values, layers, context, kv_width, itemsize = 2, 2, 256, 16, 4
    needed = keys_and_values * layers * context * kv_width * itemsize

    with pytest.raises(InvalidRequest, match=f"one context of {context} tokens takes {needed} bytes"):
        build_engine(EngineConfig(model=models.base, dtype="float32", device_bytes=1000), lambda _: models.source)


def test_a_fingerprint_is_the_digest_of_all_files_in_order(tmp_path: Path) -> None:
    """Files are hashed side by side and in blocks, and the fingerprint is that of the files' digests one after another. One
    that cannot be read is named.
    """
    contents = {"config.json": b"{}", "a.safetensors": b"", "b.safetensors": bytes(range(256)) * 70_000}
    contents |= {f"c{number}.safetensors": b"%d" % number for number in range(9)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)

    digests = b"".join(hashlib.sha256(content).digest() for content in contents.values())

    assert fingerprint(tmp_path) == "sha256:" + hashlib.sha256(b"graftwork/base/1" + digests).hexdigest()
    (tmp_path / "c3.safetensors").unlink()
    (tmp_path / "c3.safetensors").mkdir()
    with pytest.raises(InvalidRequest, match=r"c3\.safetensors cannot be read"):
        fingerprint(tmp_path)


def test_a_fingerprint_is_of_the_bytes_and_not_of_the_place(models: RandomModels, tmp_path: Path) -> None:
    """A copy of a folder has the same fingerprint; a changed weight or setting gives another."""
    copy, changed = tmp_path / "copy", tmp_path / "changed"
    shutil.copytree(models.base, copy)
    shutil.copytree(models.base, changed)
    tensors = load_file(changed / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + torch.tensor(1e-3)
    save_file(tensors, changed / "model.safetensors")
    reconfigured = edited(models.base, tmp_path / "reconfigured", lambda config: config.update({"rms_norm_eps": 1e-5}))

    assert fingerprint(copy) == fingerprint(models.base)
    assert len({fingerprint(folder) for folder in (models.base, changed, reconfigured)}) == 3
