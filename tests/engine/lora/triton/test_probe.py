"""The upload's probe through the Triton kernels, as it runs on a GPU: interpreted, in fp32."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from graftwork.engine.build.devices import load_weights
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.lora.fuse import build_resident
from graftwork.engine.lora.packs import PackCache
from graftwork.engine.lora.torch_backend import TorchLora
from graftwork.engine.lora.verify import AdapterTester, ProbeDevice
from graftwork.engine.model.batch_invariance import BatchInvariance
from graftwork.engine.model.config import read_model_config
from graftwork.engine.model.weights import DecoderWeights
from graftwork.platform.errors import ValidationFailed
from tests.engine.adapter_kinds import AdapterKinds, make_adapter_kinds
from tests.engine.lora.test_verify import turned
from tests.engine.random_models import make_base

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def adapter_kinds(tmp_path_factory: pytest.TempPathFactory) -> AdapterKinds:
    return make_adapter_kinds(make_base(tmp_path_factory.mktemp("probe") / "base"))


@pytest.fixture
def base(adapter_kinds: AdapterKinds) -> DecoderWeights:
    config = EngineConfig(adapter_kinds.base)
    return load_weights(config, read_model_config(adapter_kinds.base), CPU, torch.float32)


@pytest.fixture
def prober(interpreted: dict[str, ModuleType], adapter_kinds: AdapterKinds, base: DecoderWeights) -> AdapterTester:
    model = read_model_config(adapter_kinds.base)
    build: Callable[..., TorchLora] = interpreted["backend"].build_triton_lora
    rest = TorchLora(PackCache(0, 1), BatchInvariance(1, 1))

    def backend() -> TorchLora:
        return build(model, 128, torch.float32, CPU, rest, num_slots=1)

    return AdapterTester(base, torch.float32, ProbeDevice(CPU, backend, row_counts=(3, 20)))


@pytest.mark.parametrize("name", ["rank-3", "dora", "head", "embedding"])
def test_adapters_pass_through_the_kernels(
    prober: AdapterTester, adapter_kinds: AdapterKinds, base: DecoderWeights, name: str
) -> None:
    """Adapters whose scales, columns and vocabulary the backend applies in different ways pass in short and long steps."""
    weights = adapter_kinds.weights[name]

    prober.test(weights, build_resident(weights, base, torch.float32))


def test_the_kernels_do_not_pass_an_adapter_of_other_matrices(
    prober: AdapterTester, adapter_kinds: AdapterKinds, base: DecoderWeights
) -> None:
    """The error names the layer whose matrix differs from the upload."""
    weights = adapter_kinds.weights["rank-8"]

    with pytest.raises(ValidationFailed, match="layer 1, down_proj"):
        prober.test(weights, build_resident(turned(weights, "down_proj"), base, torch.float32))
