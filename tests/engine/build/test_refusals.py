"""What an engine refuses at its start, and at an upload: one sentence, with the setting at fault and what to do."""

import json
import re
import shutil
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from graftwork.engine.build.devices import choose_device
from graftwork.engine.build.engine import build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.messages import ProbeAdapter
from graftwork.platform.errors import GraftworkError, InvalidRequest
from tests.engine.conftest import RandomModels
from tests.engine.tagged_kv_cache import load_always

PAGE_BYTES = 2 * 2 * 4 * 16 * 4  # keys and values, layers, tokens of a page, features of a token's keys, bytes of fp32
CONTEXT_PAGES = 256 // 4
ONE_CONTEXT = CONTEXT_PAGES * PAGE_BYTES


def refused(models: RandomModels, model: Path | None = None, **options: Any) -> InvalidRequest:
    settings: dict[str, Any] = {"dtype": "float32", "page_tokens": 4, "device_bytes": 4 * 2**20} | options
    with pytest.raises(InvalidRequest) as caught:
        build_engine(EngineConfig(model or models.base, **settings), lambda _: models.source, costs=load_always())
    return caught.value


def damaged(models: RandomModels, folder: Path, name: str, content: bytes | None) -> Path:
    """A copy of the base with one other file. A content of None makes it a folder."""
    copy = Path(shutil.copytree(models.base, folder / "model"))
    path = copy / name
    path.unlink(missing_ok=True)
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    return copy


@pytest.mark.parametrize(
    ("options", "param", "told"),
    [
        ({"device_bytes": 1024}, "device_bytes", str(ONE_CONTEXT)),
        ({"device_bytes": ONE_CONTEXT}, "device_bytes", "adapter"),
        ({"device_bytes": 2**60}, "device_bytes", "give less"),
        ({"memory_share": 0.0}, "memory_share", "above 0"),
        ({"max_context_tokens": 257}, "max_context_tokens", "1 to 256"),
        ({"host_kv_bytes": 2**60}, "device_bytes", "give less"),
        ({"host_kv_bytes": PAGE_BYTES - 1}, "host_kv_bytes", str(PAGE_BYTES)),
        ({"disk_kv_bytes": 1, "kv_folder": Path("/nowhere")}, "disk_kv_bytes", "or 0 for none"),
        ({"lora_pool_bytes": 100}, "lora_pool_bytes", "leave it out"),
        ({"device": "tpu"}, "device", "auto, cpu, cuda or cuda:N"),
        ({"dtype": "fp8"}, "dtype", "float32, bfloat16, float16"),
    ],
)
def test_a_size_or_a_device_that_cannot_serve_is_refused(
    models: RandomModels, options: dict[str, Any], param: str, told: str
) -> None:
    """Sizes that are too large, or that could never hold one context, one page or one adapter, name their flag."""
    error = refused(models, **options)

    assert error.param == param
    assert told in error.message


def test_the_size_that_a_refusal_names_is_enough(models: RandomModels) -> None:
    """The number of bytes in the refusal of a device without room for adapters starts an engine."""
    least = int(refused(models, device_bytes=ONE_CONTEXT).message.split()[-2])

    models.engine(device_bytes=least)
    assert refused(models, device_bytes=least - 1).param == "device_bytes"


def test_the_context_that_a_refusal_names_is_served(models: RandomModels) -> None:
    """A shorter context starts on the same device, and prompts longer than it are refused."""
    longest = int(
        re.findall(r"--max-context-tokens of at most (\d+)", refused(models, device_bytes=ONE_CONTEXT).message)[0]
    )

    driver = models.engine(device_bytes=ONE_CONTEXT, max_context_tokens=longest)

    assert driver.engine.description.context_tokens == longest < 256
    assert refused(models, device_bytes=ONE_CONTEXT, max_context_tokens=longest + 1).param == "device_bytes"


def test_a_gpu_that_is_not_there_is_refused() -> None:
    """No machine has a hundred GPUs: the error says how many there are, and to take the CPU."""
    with pytest.raises(InvalidRequest, match=r"'cuda:99'.* finds \d+ CUDA devices.*--device cpu"):
        choose_device("cuda:99")


CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("config.json", b"{", "is not JSON"),
        ("config.json", b"[]", "holds no JSON object"),
        ("config.json", None, "cannot be read"),
        ("config.json", json.dumps(CONFIG | {"architectures": 5}).encode(), "served is one of"),
        ("config.json", json.dumps(CONFIG | {"architectures": ["GPT2LMHeadModel"]}).encode(), "served is one of"),
        ("generation_config.json", b"{", "is not JSON"),
        ("model.safetensors", b"hello", "is not a whole safetensors file"),
        ("model.safetensors.index.json", b"{}", "no index of weight files"),
    ],
)
def test_a_model_folder_with_a_damaged_file_is_refused(
    models: RandomModels, tmp_path: Path, name: str, content: bytes | None, told: str
) -> None:
    """Each file that cannot be what its name says is named, with what is wrong."""
    error = refused(models, damaged(models, tmp_path, name, content))

    assert error.param == "model"
    assert told in error.message


@pytest.mark.parametrize("setting", ["rms_norm_eps", "vocab_size", "head_dim", "layer_types", "rope_scaling"])
def test_a_setting_of_the_wrong_kind_is_refused(models: RandomModels, tmp_path: Path, setting: str) -> None:
    """A value that no model has is an error of config.json, not a failure of the engine."""
    config = json.loads((models.base / "config.json").read_text()) | {setting: "many"}

    error = refused(models, damaged(models, tmp_path, "config.json", json.dumps(config).encode()))

    assert error.message.startswith("config.json: ")


def test_half_a_weight_file_is_refused(models: RandomModels, tmp_path: Path) -> None:
    """A download that broke off is named, and asked for again."""
    whole = (models.base / "model.safetensors").read_bytes()

    error = refused(models, damaged(models, tmp_path, "model.safetensors", whole[: len(whole) // 2]))

    assert "model.safetensors" in error.message
    assert "download or copy it again" in error.message


def test_an_upload_that_could_never_be_served_is_refused_with_the_sizes(models: RandomModels) -> None:
    """An adapter above the pool is a 422 when it is tested, before any request asks for it."""
    driver = models.engine(lora_pool_bytes=8_000)
    answers: SimpleQueue[GraftworkError | None] = SimpleQueue()

    driver.loop.take(ProbeAdapter("sha256:wide", answers.put))

    error = answers.get(timeout=60)
    assert error is not None
    assert (error.status, error.code, error.param) == (422, "adapter_too_large", "weights")
    assert "8000" in error.message
