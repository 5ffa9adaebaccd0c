"""transformers and peft: `generate`, with `adapter_names` where rows have different adapters.

The base model alone is a second copy without adapter layers, and one adapter for all rows is the active one: each is
what a user of these libraries who wants speed would do.
"""

from importlib.metadata import version

import torch
from peers.protocol import Opening, Task, serve
from peft import PeftModel
from transformers import AutoModelForCausalLM, GenerationConfig


class PeftPeer:
    """A `PeerEngine`."""

    version = f"transformers {version('transformers')}, peft {version('peft')}, torch {torch.__version__}"

    def __init__(self, opening: Opening) -> None:
        torch.set_num_threads(1)
        dtype = getattr(torch, opening.dtype)
        self._base = AutoModelForCausalLM.from_pretrained(opening.base, dtype=dtype).train(False)
        first, *others = opening.adapters
        under = AutoModelForCausalLM.from_pretrained(opening.base, dtype=dtype)
        self._adapted = PeftModel.from_pretrained(under, first, adapter_name="0")
        for index, folder in enumerate(others, start=1):
            self._adapted.load_adapter(folder, adapter_name=str(index))
        self._adapted.to(dtype).train(False)  # peft would keep fp32 adapters under a bf16 base

    @torch.inference_mode()
    def generate(self, task: Task) -> list[list[int]]:
        prompts = torch.tensor(task.prompts)  # [batch, prompt_tokens]
        adapters = sorted({adapter for adapter in task.adapters if adapter is not None})
        options: dict[str, object] = {}
        model = self._adapted if adapters else self._base
        if len(adapters) == 1 and None not in task.adapters:
            self._adapted.set_adapter(str(adapters[0]))
        elif adapters:
            options["adapter_names"] = ["__base__" if one is None else str(one) for one in task.adapters]
        settings = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False, max_new_tokens=task.output_tokens, eos_token_id=None, pad_token_id=0
        )
        output = model.generate(
            input_ids=prompts, attention_mask=torch.ones_like(prompts), generation_config=settings, **options
        )
        return [row[prompts.shape[1] :] for row in output.tolist()]


if __name__ == "__main__":
    serve(PeftPeer)
