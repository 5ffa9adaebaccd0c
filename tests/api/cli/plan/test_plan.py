"""Tests of the plan: its sizes are the engine's, its speeds follow from measurements, and its numbers agree."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GptOssConfig

from graftwork.api.cli.plan.energy import EnergyReading, energy_between, read_energy
from graftwork.api.cli.plan.planner import BUSY_SHARE, Demand, make_plan
from graftwork.api.cli.plan.sizes import ModelSizes
from graftwork.api.cli.plan.speeds import DEVICES, Level, MeasuredSpeed, RooflineSpeed
from graftwork.api.sdk.transport.errors import ConfigurationError
from graftwork.engine.kv.transfer.device_memory import bytes_per_page
from tests.api.cli.conftest import Graftwork
from tests.engine.expert_families import EXPERT_FAMILIES
from tests.engine.families import FAMILIES
from tests.engine.hybrid_families import HYBRID_FAMILIES
from tests.engine.mxfp4_checkpoints import make_mxfp4

DEMO = Path("demo/model")
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}


PAGE_TOKENS = 16


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def stored_bytes(path: Path) -> int:
    """The bytes of all tensors in a safetensors file."""
    with path.open("rb") as file:
        length: int = struct.unpack("<Q", file.read(8))[0]
        return path.stat().st_size - 8 - length


def test_weights_are_those_of_the_file() -> None:
    """The parameters that follow from config.json have the bytes of the checkpoint."""
    assert ModelSizes.read(DEMO).weights_bytes == stored_bytes(DEMO / "model.safetensors")


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe-windows", "glm4-moe", "gpt-oss"])
def test_weights_of_experts_are_those_of_the_file(tmp_path: Path, name: str) -> None:
    """Routers, corrections, shared experts, biases and sinks count, and a token computes with its chosen experts alone."""
    model: Any = AutoModelForCausalLM.from_config(EXPERT_FAMILIES[name], dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.save_pretrained(tmp_path)

    sizes = ModelSizes.read(tmp_path)

    assert sizes.weights_bytes == stored_bytes(tmp_path / "model.safetensors")
    assert 0 < sizes.token_flops < 2 * sizes.parameters


def test_experts_in_mxfp4_have_the_bytes_of_the_file(tmp_path: Path) -> None:
    """Experts that stay as codes count with four bits and a quarter for each weight, as the file has them."""
    settings = EXPERT_FAMILIES["gpt-oss"].to_dict() | {"hidden_size": 64, "intermediate_size": 32}
    _, packed = make_mxfp4(tmp_path, GptOssConfig(**settings))

    assert ModelSizes.read(packed).weights_bytes == stored_bytes(packed / "model.safetensors")


@pytest.mark.parametrize("name", ["gemma3n", "gemma3n-wide"])
def test_weights_of_several_streams_are_those_of_the_file(tmp_path: Path, name: str) -> None:
    """Streams, inputs of layers and MLPs of other widths count, and layers that read others' keys have no KV."""
    model: Any = AutoModelForCausalLM.from_config(FAMILIES[name], dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.save_pretrained(tmp_path)

    sizes = ModelSizes.read(tmp_path)

    assert sizes.weights_bytes == stored_bytes(tmp_path / "model.safetensors")
    assert 0 < sizes.token_flops < 2 * sizes.parameters
    num_layers = sum(key.endswith("k_proj.weight") for key in model.state_dict())
    assert bytes_per_page(sizes.model, 16, torch.float32) == num_layers * 16 * 2 * 16 * 4


@pytest.mark.parametrize("name", HYBRID_FAMILIES)
def test_sizes_of_recurrent_layers_are_those_of_the_file_and_the_engine(tmp_path: Path, name: str) -> None:
    """Convolutions, step sizes, skips and norms count as weights, and states as bytes of pages."""
    model: Any = AutoModelForCausalLM.from_config(HYBRID_FAMILIES[name], dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.save_pretrained(tmp_path)

    sizes = ModelSizes.read(tmp_path)

    assert sizes.weights_bytes == stored_bytes(tmp_path / "model.safetensors")
    page_tokens = sizes.model.page_tokens
    page = bytes_per_page(sizes.model, page_tokens, torch.float32)
    assert sizes.kv_bytes(page_tokens + 1) == 2 * page
    states = sum(
        4 * (layer.num_heads * layer.head_dim * layer.ssm_state_size + layer.conv_dim * (layer.conv_kernel_size - 1))
        for layer in model.modules()
        if type(layer).__name__ == "GraniteMoeHybridMambaLayer"
    )
    keys_and_values = sum(name.endswith("k_proj.weight") for name in model.state_dict()) * page_tokens * 2 * 16 * 4
    assert states + keys_and_values <= page <= 1.5 * states + keys_and_values + 2 * page_tokens * 16 * 4


def test_a_known_model_has_its_known_sizes(llama: Path) -> None:
    """Llama 3.1 8B has 8,030,261,248 parameters and 128 KiB of KV a token in bf16."""
    sizes = ModelSizes.read(llama)

    assert sizes.parameters == 8_030_261_248
    assert sizes.kv_bytes(PAGE_TOKENS) == PAGE_TOKENS * 128 * 1024


def test_an_adapter_has_the_bytes_of_its_file() -> None:
    """The demo's adapters change all seven targets: their bytes follow from rank and shapes."""
    config = json.loads(Path("demo/adapters/pirate/adapter_config.json").read_text())
    path = Path("demo/adapters/pirate/adapter_model.safetensors")

    stored = stored_bytes(path)
    planned = {dtype: ModelSizes.read(DEMO, dtype).adapter_bytes(config["r"]) for dtype in ("float32", "bfloat16")}

    assert stored in planned.values()


@given(st.integers(1, 10_000), st.sampled_from(["float32", "bfloat16"]))
def test_kv_is_the_engines(tokens: int, dtype: str) -> None:
    """A context takes whole pages of the size that the engine allocates."""
    sizes = ModelSizes.read(DEMO, dtype)
    page = bytes_per_page(sizes.model, PAGE_TOKENS, getattr(torch, dtype))

    assert sizes.kv_bytes(tokens) == -(-tokens // PAGE_TOKENS) * page


@given(st.floats(1e-4, 1.0), st.floats(1e-6, 0.1))
def test_a_line_is_found_again(fixed_s: float, row_s: float) -> None:
    """From levels that lie on a line, the fit is that line, whatever it is."""
    levels = [Level(batch, batch / (fixed_s + row_s * batch), 1.0, None) for batch in (1, 4, 16)]

    speed = MeasuredSpeed.fit(levels)

    assert speed.fixed_s == pytest.approx(fixed_s, rel=1e-6, abs=1e-9)
    assert speed.row_s == pytest.approx(row_s, rel=1e-6, abs=1e-9)
    assert speed.deviation < 1e-6


def test_a_batch_that_is_slower_in_pieces_has_no_negative_time() -> None:
    """Where more outstanding chats than double the tokens, steps are of fixed length; where they add none, of rows."""
    faster = MeasuredSpeed.fit([Level(1, 10.0, 1.0, None), Level(2, 30.0, 1.0, None)])
    saturated = MeasuredSpeed.fit([Level(1, 100.0, 1.0, None), Level(2, 90.0, 1.0, None)])

    assert (faster.row_s, saturated.fixed_s) == (0.0, 0.0)
    assert faster.fixed_s > 0
    assert saturated.row_s > 0


def demand(**changes: float) -> Demand:
    whole = {"tenants": 10, "adapters": 20, "rank": 16, "sessions": 100, "context_tokens": 4096, "requests_per_s": 10.0}
    return Demand(**(whole | {"prompt_tokens": 200, "output_tokens": 200} | changes))  # type: ignore[arg-type]


@given(st.floats(0.1, 500.0), st.integers(0, 2000), st.integers(1, 1000), st.integers(0, 300))
def test_a_plan_serves_its_demand(
    llama_sizes: ModelSizes, rate: float, prompt: int, output: int, adapters: int
) -> None:
    """The replicas are the fewest that are not too busy, and what runs at a time obeys Little's law."""
    wanted = demand(requests_per_s=rate, prompt_tokens=prompt, output_tokens=output, adapters=adapters)
    speed = RooflineSpeed(DEVICES["H100"], llama_sizes, wanted.context_tokens, adapters, 16)

    found = make_plan(wanted, llama_sizes, speed, DEVICES["H100"], 2.0)

    most = found.tokens_per_s / output * BUSY_SHARE
    assert rate <= found.replicas * most * (1 + 1e-9)
    assert found.replicas == 1 or rate > (found.replicas - 1) * most * (1 - 1e-9)
    assert found.busy <= BUSY_SHARE * (1 + 1e-9)
    assert found.running_per_replica <= found.max_running
    assert found.dollars_per_million == pytest.approx(2.0 * found.replicas / (rate * output * 3600) * 1e6)


@pytest.fixture(scope="module")
def llama_sizes(tmp_path_factory: pytest.TempPathFactory) -> ModelSizes:
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return ModelSizes.read(folder)


def test_what_does_not_fit_is_refused(llama_sizes: ModelSizes) -> None:
    """A context that leaves no room beside the weights is an error that says what to change."""
    wanted = demand(context_tokens=600_000)
    speed = RooflineSpeed(DEVICES["L40S"], llama_sizes, wanted.context_tokens, 0, 16)

    with pytest.raises(ConfigurationError, match="take a larger --gpu, or a shorter --context"):
        make_plan(wanted, llama_sizes, speed, DEVICES["L40S"], None)


def test_the_command_plans_from_a_measurement(graftwork: Graftwork, tmp_path: Path) -> None:
    """The plan has the measured levels beside its own speeds, and checks them by Little's law."""
    phases = [
        {
            "name": f"{batch} outstanding",
            "tokens_per_s": batch / (0.01 + 0.001 * batch),
            "chats_per_s": 2.0,
            "tenants": [{"latency_mean": batch / 2.0}],
        }
        for batch in (1, 2, 4)
    ]
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"phases": phases}))

    result = graftwork("plan", "--model", str(DEMO), "--gpu", "cpu", "--measured", str(path), "--json")
    table = graftwork("plan", "--model", str(DEMO), "--gpu", "cpu", "--measured", str(path), "--dollars-per-hour", "1")

    assert result.exit_code == 0, result.output
    body = json.loads(result.stdout)
    for level in body["levels"]:
        assert level["planned_tokens_per_s"] == pytest.approx(level["measured_tokens_per_s"])
        assert level["little"] == pytest.approx(1.0)
    assert body["joules_per_token"] is None
    assert "a million tokens" in table.stdout
    assert "Little" in table.stdout.replace("LITTLE", "Little")


def test_a_roofline_says_that_nobody_has_measured_it(graftwork: Graftwork, llama: Path) -> None:
    """Without a measurement, the plan for a GPU names its assumptions, and a CPU has no plan."""
    result = graftwork("plan", "--model", str(llama), "--gpu", "H100", "--rate", "20")
    refused = graftwork("plan", "--model", str(llama), "--gpu", "cpu")
    unknown = graftwork("plan", "--model", str(llama), "--gpu", "B9000")

    assert result.exit_code == 0, result.output
    assert "NOT MEASURED" in result.stdout
    assert (refused.exit_code, unknown.exit_code) == (2, 2)
    assert "--measure" in refused.output
    assert "H200" in unknown.output


def test_a_file_that_is_no_measurement_is_named(graftwork: Graftwork, tmp_path: Path) -> None:
    """A wrong file is an error that says what file is wanted."""
    path = tmp_path / "other.json"
    path.write_text('{"phases": [{"name": "alone"}]}')

    result = graftwork("plan", "--model", str(DEMO), "--gpu", "cpu", "--measured", str(path))

    assert result.exit_code == 1
    assert "bench throughput --json" in result.output


def test_energy_counts_on_over_the_end_of_a_counter(tmp_path: Path) -> None:
    """RAPL's counters start again at their range; a machine without counters says that nothing can be read."""
    package = tmp_path / "intel-rapl:0"
    package.mkdir()
    (package / "max_energy_range_uj").write_text("999999\n")
    (package / "energy_uj").write_text("900000\n")
    before = read_energy(tmp_path)
    (package / "energy_uj").write_text("100000\n")

    after = read_energy(tmp_path)
    nothing = energy_between(EnergyReading(0.0, {}, None), EnergyReading(1.0, {}, None))
    gpu = energy_between(EnergyReading(0.0, {}, 100.0), EnergyReading(2.0, {}, 300.0))

    assert after.packages == {"intel-rapl:0": (100_000, 999_999)}
    only_cpu = energy_between(EnergyReading(0.0, before.packages, None), EnergyReading(1.0, after.packages, None))
    assert only_cpu.joules == pytest.approx(0.2)
    assert nothing.joules is None
    assert "not readable" in nothing.source
    assert gpu.joules == pytest.approx(400.0)
