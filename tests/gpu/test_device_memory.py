"""Tests on a GPU: pinned memory, copies of adapters beside computation, the measured memory, and the probe of uploads."""

from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

from graftwork.engine.build.devices import CudaMeter, load_weights
from graftwork.engine.build.lora import build_lora, build_probe_lora
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.kv.transfer.system_memory import CudaRegistry, PinnedBlock
from graftwork.engine.lora.adapter_copies import AdapterCopied, build_adapter_copies
from graftwork.engine.lora.fuse import build_resident
from graftwork.engine.lora.verify import AdapterTester, ProbeDevice
from graftwork.engine.model.config import read_model_config
from graftwork.platform.errors import ValidationFailed

pytest.importorskip("peft", reason="peft and transformers, which make the models of these tests, are not installed")
from tests.engine.lora.test_verify import turned
from tests.engine.lora.triton.engine_runs import weights
from tests.engine.random_models import make_base

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MIB = 2**20


def test_a_block_is_pinned_until_it_is_closed() -> None:
    """The driver knows the block as pinned memory, and forgets it when it is closed."""
    block = PinnedBlock(3 * MIB + 5, CudaRegistry())

    before = block.data.is_pinned()
    block.close()

    assert (before, block.data.is_pinned()) == (True, False)


def test_an_adapter_arrives_whole_beside_computation() -> None:
    """84 MB arrive unchanged while the compute stream is busy, in frames that this stream wrote right before."""
    device, inbox = torch.device("cuda:0"), SimpleQueue[AdapterCopied]()
    copies = build_adapter_copies(device, inbox.put)
    source = torch.randint(0, 256, (84 * MIB + 3,), dtype=torch.uint8)
    target = torch.empty_like(source, device=device)
    matrix = torch.randn(4096, 4096, device=device)
    for _ in range(50):
        matrix = matrix @ matrix * 1e-2
    target.fill_(7)

    assert not copies.begin("one", source, target)

    assert inbox.get(timeout=60) == AdapterCopied("one")
    assert torch.equal(target.cpu(), source)
    copies.close()


def test_the_meter_sees_what_an_act_takes() -> None:
    """The peak has the act's memory and little more, and the memory is free again afterwards."""
    meter = CudaMeter(torch.device("cuda:0"))
    free = meter.free_bytes()

    def act() -> None:
        torch.empty(256 * MIB, dtype=torch.uint8, device=meter.device).zero_()

    peak = meter.peak_of(act)

    assert 256 * MIB <= peak < 320 * MIB
    assert abs(meter.free_bytes() - free) < 64 * MIB


def test_an_engine_without_sizes_takes_its_share_of_the_gpu(tmp_path: Path) -> None:
    """Steps, copies and frames together take at most the share of what the weights leave."""
    from graftwork.engine.build.engine import build_engine
    from tests.engine.lora.test_lifecycle import CountingAdapterSource

    base = make_base(tmp_path / "base")
    meter = CudaMeter(torch.device("cuda:0"))
    free = meter.free_bytes()

    engine = build_engine(
        EngineConfig(base, device="cuda:0", memory_share=0.05, host_kv_bytes=MIB), lambda _: CountingAdapterSource({})
    )

    assert 0.5 * 0.05 * free < engine.memory.frames.nbytes <= 0.05 * free


def test_an_upload_is_proven_on_the_gpu_by_its_kernels(tmp_path: Path) -> None:
    """A right adapter passes in bf16, and one with another matrix does not."""
    pytest.importorskip("triton", reason="the kernels extra is not installed")
    config, device = EngineConfig(make_base(tmp_path / "base")), torch.device("cuda:0")
    model = read_model_config(config.model)
    base = load_weights(config, model, device, torch.bfloat16)
    served = build_lora(config, model, device, torch.bfloat16)
    where = ProbeDevice.of(device, lambda: build_probe_lora(config, model, served, device, torch.bfloat16))
    prober = AdapterTester(base, torch.bfloat16, where)
    upload = weights("wide", 64, 1, num_layers=2, scale=0.3)

    prober.test(upload, build_resident(upload, base, torch.bfloat16))
    with pytest.raises(ValidationFailed, match="layer 1, down_proj"):
        prober.test(upload, build_resident(turned(upload, "down_proj"), base, torch.bfloat16))
