"""libllama, driven by a plain loop: no server, no scheduler, greedy sampling by numpy.

A context has one set of adapters at a time, so rows with different adapters are decoded group by group within a step.
That is what llama.cpp's own server must do, too: it batches only slots whose adapters are equal.
"""

import ctypes
from importlib.metadata import version

import llama_cpp  # type: ignore[import-not-found]
import numpy as np
import numpy.typing as npt
from peers.protocol import Opening, Task, serve

_MAX_ROWS = 32
_ROW_TOKENS = 256
_BATCH_TOKENS = 2048


class LlamaCppPeer:
    """A `PeerEngine`."""

    version = f"llama.cpp of llama-cpp-python {version('llama-cpp-python')}"

    def __init__(self, opening: Opening) -> None:
        files = opening.model / "gguf"
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            str(files / "base.gguf").encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = _MAX_ROWS * _ROW_TOKENS
        params.n_batch = _BATCH_TOKENS
        params.n_ubatch = _BATCH_TOKENS
        params.n_seq_max = _MAX_ROWS
        params.n_threads = params.n_threads_batch = 1
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._adapters = [
            llama_cpp.llama_adapter_lora_init(self._model, str(files / f"{folder.name}.gguf").encode())
            for folder in opening.adapters
        ]
        assert self._model
        assert self._context
        assert all(self._adapters)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(_BATCH_TOKENS, 0, 1)

    def generate(self, task: Task) -> list[list[int]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        groups: dict[int | None, list[int]] = {}
        for row, adapter in enumerate(task.adapters):
            groups.setdefault(adapter, []).append(row)
        tokens: list[list[int]] = [[] for _ in task.prompts]
        for step in range(task.output_tokens):
            for adapter, rows in groups.items():
                self._use(adapter)
                new = [task.prompts[row] if step == 0 else tokens[row][-1:] for row in rows]
                starts = [0 if step == 0 else len(task.prompts[row]) + step - 1 for row in rows]
                for row, token in zip(rows, self._decode(rows, new, starts), strict=True):
                    tokens[row].append(token)
        return tokens

    def _use(self, adapter: int | None) -> None:
        """Does nothing where it is in use already."""
        chosen = [] if adapter is None else [self._adapters[adapter]]
        handles = (llama_cpp.llama_adapter_lora_p_ctypes * len(chosen))(*chosen)
        scales = (ctypes.c_float * len(chosen))(*[1.0] * len(chosen))
        status = llama_cpp.llama_set_adapters_lora(self._context, handles, len(chosen), scales)
        if status != 0:
            raise RuntimeError(f"llama_set_adapters_lora answers {status} for adapter {adapter}.")

    def _decode(self, rows: list[int], new: list[list[int]], starts: list[int]) -> list[int]:
        """Feed each row its new tokens and choose its next."""
        batch, size = self._batch, 0
        for row, tokens, start in zip(rows, new, starts, strict=True):
            for offset, token in enumerate(tokens):
                batch.token[size] = token
                batch.pos[size] = start + offset
                batch.n_seq_id[size] = 1
                batch.seq_id[size][0] = row
                batch.logits[size] = offset == len(tokens) - 1
                size += 1
        batch.n_tokens = size
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode answers {status} for {size} tokens.")
        pointer = llama_cpp.llama_get_logits(self._context)
        logits: npt.NDArray[np.float32] = np.ctypeslib.as_array(pointer, (len(rows), self._vocab_size))
        chosen: list[int] = logits.argmax(axis=1).tolist()
        return chosen


if __name__ == "__main__":
    serve(LlamaCppPeer)
