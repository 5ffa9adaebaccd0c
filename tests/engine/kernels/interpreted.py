"""Runs Triton kernels by Triton's interpreter on CPU tensors, in a process that can also compile them."""

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

import pytest


def interpreted_copies(names: Sequence[str]) -> dict[str, ModuleType]:
    """Returns copies of modules, by full name, in which all kernels are interpreted.

    `names` are the modules that define kernels, and those that import such modules, in any order. Whether a kernel is
    compiled or interpreted is settled when its module is loaded. Only these copies are loaded under TRITON_INTERPRET,
    after triton itself, so that compiled kernels still work in the same process. Skips the test without triton.
    """
    pytest.importorskip("triton", reason="the kernels extra is not installed")
    parents = {name: vars(importlib.import_module(name.rpartition(".")[0])) for name in names}
    own = {name: name.rpartition(".")[2] for name in names}
    compiled = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    attributes = {name: parents[name].pop(own[name]) for name in names if own[name] in parents[name]}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            return {name: importlib.import_module(name) for name in names}
    finally:
        for name in names:
            sys.modules.pop(name, None)
            parents[name].pop(own[name], None)
        sys.modules.update(compiled)
        for name, module in attributes.items():
            parents[name][own[name]] = module
