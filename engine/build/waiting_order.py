"""Builds the order of waiting requests that the configuration names.

Owns the prices of the engine: the price of memory follows from the measured speed of the device.
"""

from graftwork.engine.core.config import EngineConfig
from graftwork.engine.kv.index.cost_model import CostTracker
from graftwork.engine.kv.index.kv_sizes import KvSizes
from graftwork.engine.kv.manager import KvCacheManager
from graftwork.engine.scheduler.order.fair_share import DeficitPrefixOrder, VirtualTokenCounter
from graftwork.engine.scheduler.order.locality import DeviceLocality
from graftwork.engine.scheduler.order.request_rank import DeficitSettings
from graftwork.engine.scheduler.order.waiting_order import FirstComeFirstServed, ServicePrices, WaitingOrder
from graftwork.engine.scheduler.resources import AdapterProvider
from graftwork.engine.scheduler.validation import SchedulerLimits
from graftwork.platform.clock import Clock
from graftwork.platform.errors import InvalidRequest

_STEPS_OF_QUANTUM = 4
"""A tenant may be ahead by the prompt tokens of so many steps: far below a second on a GPU, and enough that prompts
with a common prefix run one after the other.
"""


def build_order(
    config: EngineConfig,
    limits: SchedulerLimits,
    kv_cache: KvCacheManager,
    adapters: AdapterProvider,
    costs: CostTracker,
    clock: Clock,
) -> WaitingOrder:
    """Returns the order of `config.scheduling_policy`. Raises InvalidRequest if there is no such policy."""
    prices = service_prices(config.kv_price, kv_cache.page_store.sizes, costs)
    match config.scheduling_policy:
        case "fcfs":
            return FirstComeFirstServed()
        case "vtc":
            return VirtualTokenCounter(clock, prices)
        case "dlpm":
            quantum = config.fairness_quantum
            if quantum is None:
                quantum = _STEPS_OF_QUANTUM * limits.max_batch_tokens
            locality = DeviceLocality(kv_cache.page_store.tree, adapters.is_ready)
            return DeficitPrefixOrder(clock, locality, prices, DeficitSettings(float(quantum)))
    raise InvalidRequest(
        f"There is no scheduling policy {config.scheduling_policy!r}: choose dlpm, vtc or fcfs.",
        param="scheduling_policy",
    )


def service_prices(kv_price: float, sizes: KvSizes, costs: CostTracker) -> ServicePrices:
    """Returns the prices of an engine. Holding all device pages costs `kv_price` of computing prompts all the time. Bytes of
    adapters cost the prompt tokens that are computed in the time in which so many bytes of KV are loaded from the host.
    """
    tokens_per_second = 1.0 / max(costs.cost.prefill.token_s, 1e-9)
    megabyte_s = costs.cost.host.page_s * 1e6 / sizes.page_bytes
    return ServicePrices(
        page_second=kv_price * tokens_per_second / sizes.device_pages, adapter_megabyte=megabyte_s * tokens_per_second
    )
