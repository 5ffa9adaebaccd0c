"""Carries out the commands of rank 0 on another rank: steps, moves of frames, adapters, transfers of pages.

Owns what the rank has on its device: which adapter lies in which frames. Decides nothing and samples nothing. A command
that fails ends the rank, because the ranks would no longer hold the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition
from typing import Any

import torch

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.core.requests import KvFileKey
from graftwork.engine.kv.disk.shared import TierStore
from graftwork.engine.kv.transfer.copier import PageCopier
from graftwork.engine.kv.transfer.device_memory import DeviceMemory, KvCache
from graftwork.engine.kv.transfer.host_memory import HostMemory
from graftwork.engine.kv.transfer.plan import LayerGate, LoadReadable, TransferDone, TransferPlan
from graftwork.engine.lora.backend import LoraBackend
from graftwork.engine.lora.resident_adapter import ResidentAdapter
from graftwork.engine.parallel.adapters import open_part
from graftwork.engine.parallel.commands import Envelope, disk_report, step_of, transfer_of
from graftwork.engine.runner.forward import PlainForward
from graftwork.platform.clock import Clock


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory of one rank on all tiers."""

    device: DeviceMemory
    cache: KvCache
    host: HostMemory
    disk: TierStore | None


class Follower:
    """One rank above 0. Only its own thread calls it."""

    def __init__(self, forward: PlainForward, adapters: "FollowerAdapters", pages: "FollowerPages") -> None:
        self._forward = forward
        self._adapters = adapters
        self._pages = pages

    @torch.inference_mode()
    def obey(self, command: Envelope) -> None:
        """Carries out one command. Raises whatever goes wrong."""
        match command.kind:
            case "step":
                self._step(command)
            case "transfer" | "sweep" | "forget_page" | "forget_domain" | "unlock_domain":
                self._pages.obey(command)
            case "move" | "place" | "renew" | "forget":
                self._adapters.obey(command)
            case unknown:
                raise ValueError(f"rank 0 sent a command of unknown kind {unknown!r}")

    def close(self) -> None:
        """Carries out all transfers, and ends the copy threads."""
        self._pages.close()

    def _step(self, command: Envelope) -> None:
        self._adapters.step_begins()
        self._pages.wait_for(command.values["loads"])
        self._forward.follow(step_of(command))


class FollowerAdapters:
    """The adapters in the frames of one rank, as ResidentAdapters, and the moves of frames."""

    def __init__(self, memory: DeviceMemory, lora: LoraBackend, dtype: torch.dtype) -> None:
        self._memory = memory
        self._lora = lora
        self._dtype = dtype
        self._placed: dict[str, ResidentAdapter] = {}
        self._forgotten: dict[str, ResidentAdapter] = {}
        """Adapters that were forgotten since the last step: those whose frames were moved come back."""

    def obey(self, command: Envelope) -> None:
        values = command.values
        match command.kind:
            case "move":
                self._memory.move([(source, target) for source, target in values["moves"]])
            case "place":
                self._place(values["ticket"], values["frame"])
            case "renew":
                self._renew(values["digest"], values["frame"])
            case "forget":
                self._lora.forget(values["digest"])
                self._forgotten[values["digest"]] = self._placed.pop(values["digest"])

    def get(self, digest: str) -> ResidentAdapter:
        """Returns an adapter that is on the device. The result must be used only in this step."""
        return self._placed[digest]

    def step_begins(self) -> None:
        """Drops what was forgotten: no adapter comes back after a step."""
        self._forgotten.clear()

    def _place(self, ticket: dict[str, Any], frame: int) -> None:
        on_host = open_part(ticket, self._dtype)
        on_device = on_host.over(self._memory.buffer(frame, on_host.num_bytes))
        on_device.buffer.copy_(on_host.buffer)
        self._lora.place(on_device)
        self._placed[on_device.digest] = on_device

    def _renew(self, digest: str, frame: int) -> None:
        before = self._forgotten.pop(digest)
        on_device = before.over(self._memory.buffer(frame, before.num_bytes))
        self._lora.place(on_device)
        self._placed[digest] = on_device


class FollowerPages:
    """The pages of one rank on all tiers, and the transfers between them."""

    def __init__(
        self, memory: RankMemory, report: Callable[[Envelope], None], clock: Clock, *, overlaps_loads: bool
    ) -> None:
        """`report` sends a report to rank 0. It is called on the copy threads."""
        self._memory = memory
        self._send_report = report
        self._changed = Condition()
        self._running: dict[int, TransferPlan] = {}
        self._gates: dict[TransferPlan, LayerGate] = {}
        self._copier = PageCopier(
            memory.cache, memory.host, memory.disk, self._report, clock, overlaps_loads=overlaps_loads
        )

    def obey(self, command: Envelope) -> None:
        disk, values = self._memory.disk, command.values
        match command.kind:
            case "transfer":
                plan = transfer_of(command)
                with self._changed:
                    self._running[values["number"]] = plan
                self._copier.begin(plan)
            case "sweep":
                self._copier.sweep()
            case "forget_page" if disk is not None:
                disk.forget(PageKey(bytes.fromhex(values["key"])))
            case "forget_domain" if disk is not None:
                disk.forget_domain(bytes.fromhex(values["domain"]))
            case "unlock_domain" if disk is not None:
                disk.unlock(bytes.fromhex(values["domain"]), KvFileKey(bytes.fromhex(values["key"])))

    def wait_for(self, loads: Sequence[int]) -> None:
        """Makes the next step wait, layer by layer, for those of `loads` that run. Waits until they have begun."""
        with self._changed:
            self._changed.wait_for(lambda: all(self._has_begun(load) for load in loads))
            running = {self._running[load]: self._gates[self._running[load]] for load in loads if load in self._running}
        gates = self._memory.cache.gates
        for plan, gate in running.items():
            gates.add(plan, gate)
        gates.select(running)
        for plan in running:
            gates.remove(plan)

    def close(self) -> None:
        self._copier.close()

    def _has_begun(self, load: int) -> bool:
        return load not in self._running or self._running[load] in self._gates

    def _report(self, message: TransferDone | LoadReadable) -> None:
        with self._changed:
            if isinstance(message, LoadReadable):
                self._gates[message.plan] = message.gate
                self._changed.notify_all()
                return
            number = next(number for number, plan in self._running.items() if plan is message.plan)
            del self._running[number]
            self._gates.pop(message.plan, None)
            self._changed.notify_all()
        values = {"number": number, "num_good": message.num_good}
        self._send_report(Envelope("transferred", values | disk_report(self._memory.disk)))
