"""Turns the yardstick's files into GGUF with the converters of llama.cpp's own source.

Runs where torch and transformers are. The tokenizer is one that no converter has heard of, and nothing is tokenized:
it is declared to be of GPT-2's kind.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path

from peers.protocol import Opening


def convert(opening: Opening, source: Path) -> None:
    """Make gguf/base.gguf and gguf/00.gguf and on, beside base/ and adapters/; all of them or none."""
    target = opening.model / "gguf"
    if target.is_dir():
        return
    staged = opening.model / "gguf.part"
    staged.mkdir(exist_ok=True)
    _run("base", source, opening.base, "--outfile", staged / "base.gguf", "--outtype", "bf16")
    for folder in opening.adapters:
        outfile = staged / f"{folder.name}.gguf"
        _run("lora", source, folder, "--base", opening.base, "--outfile", outfile, "--outtype", "bf16")
    staged.rename(target)


def _run(kind: str, source: Path, *arguments: object) -> None:
    """A process each: the converters are programs, not a library."""
    command = [sys.executable, "-m", "peers.llama_cpp_files", kind, source, *arguments]
    home = Path(__file__).parent.parent
    done = subprocess.run([str(part) for part in command], check=False, cwd=home, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{arguments[0]} could not be converted to GGUF:\n{done.stderr[-2000:]}")


def _run_converter(kind: str, source: Path, arguments: list[str]) -> None:
    sys.path.insert(0, str(source))
    sys.path.insert(1, str(source / "gguf-py"))
    from conversion.base import TextModel  # type: ignore[import-not-found]
    from conversion.llama import LlamaModel  # type: ignore[import-not-found]

    TextModel.get_vocab_base_pre = lambda model, tokenizer: "gpt-2"
    LlamaModel.set_vocab = TextModel._set_vocab_gpt2
    program = source / ("convert_hf_to_gguf.py" if kind == "base" else "convert_lora_to_gguf.py")
    sys.argv = [str(program), *arguments]
    runpy.run_path(str(program), run_name="__main__")


if __name__ == "__main__":
    os.environ["NO_LOCAL_GGUF"] = "1"  # it is on the path already
    _run_converter(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
