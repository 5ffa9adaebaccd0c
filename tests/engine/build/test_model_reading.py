"""Tests of a model that is read while a process imports its code: the files' fingerprint, and the weights."""

import shutil
from pathlib import Path

import pytest
import torch

from graftwork.engine.build.devices import ModelReading, load_weights
from graftwork.engine.build.engine import build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.model.config import read_model_config
from graftwork.engine.model.fingerprint import fingerprint
from graftwork.platform.errors import InvalidRequest
from tests.engine.conftest import RandomModels
from tests.engine.engine_driver import EngineDriver
from tests.engine.random_models import make_base
from tests.engine.tagged_kv_cache import load_always


def test_weights_read_ahead_are_the_models(models: RandomModels) -> None:
    """The weights have the bits of those that are read afterwards, in the dtype that the engine serves."""
    config = EngineConfig(models.base, dtype="bfloat16")

    weights = ModelReading(config).weights()

    assert weights is not None
    model = read_model_config(models.base)
    expected = load_weights(config, model, torch.device("cpu"), torch.bfloat16)
    assert torch.equal(weights.embedding, expected.embedding)
    assert len(weights.layers) == model.num_layers
    for own, other in zip(weights.layers, expected.layers, strict=True):
        for one, two in zip(own.linears, other.linears, strict=True):
            assert torch.equal(one.weight, two.weight)
            assert one.is_packed == two.is_packed


def test_an_engine_takes_what_was_read_for_it(models: RandomModels, tmp_path: Path) -> None:
    """An engine over a model that was read ahead needs its weight files no more, has its fingerprint, and gives the tokens
    of any other engine."""
    folder = Path(shutil.copytree(models.base, tmp_path / "base"))
    config = EngineConfig(folder, dtype="float32", page_tokens=4, device_bytes=4 * 2**20)
    reading = ModelReading(config)
    assert reading.fingerprint() == fingerprint(models.base)
    assert reading.weights() is not None
    (folder / "model.safetensors").unlink()

    engine = build_engine(config, lambda _: models.source, costs=load_always(), reading=reading)

    assert engine.description.fingerprint == fingerprint(models.base)
    prompt = list(range(2, 20))
    expected = models.engine().run(prompt, max_tokens=6, ignore_eos=True).token_ids
    assert EngineDriver(engine).run(prompt, max_tokens=6, ignore_eos=True).token_ids == expected


def test_ranks_that_divide_the_weights_read_them_themselves(models: RandomModels) -> None:
    """With tensor parallelism no weights are read ahead; the fingerprint is."""
    reading = ModelReading(EngineConfig(models.base, tensor_parallel=2))

    assert reading.weights() is None
    assert reading.fingerprint() == fingerprint(models.base)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_that_lacks_a_tensor_is_named(tmp_path: Path, layer: int) -> None:
    """A tensor that is missing in any layer is named by the error, whether the weights are read ahead or not."""
    from safetensors.torch import load_file, save_file

    folder = make_base(tmp_path / "base")
    tensors = load_file(folder / "model.safetensors")
    name = f"model.layers.{layer}.mlp.down_proj.weight"
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    config = EngineConfig(folder)

    with pytest.raises(InvalidRequest, match=name):
        ModelReading(config).weights()
    with pytest.raises(InvalidRequest, match=name):
        load_weights(config, read_model_config(folder), torch.device("cpu"), torch.float32)
