"""Runs Triton kernels by Triton's interpreter on CPU tensors, in a process that can also compile them."""

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import cache, wraps
from types import ModuleType
from typing import Any

import numpy as np
import pytest


def interpreted_copies(names: Sequence[str]) -> dict[str, ModuleType]:
    """Returns copies of modules, by full name, in which all kernels are interpreted.

    `names` are the modules that define kernels, and those that import such modules, in any order. Whether a kernel is
    compiled or interpreted is settled when its module is loaded. Only these copies are loaded under TRITON_INTERPRET,
    after triton itself, so that compiled kernels still work in the same process. Skips the test without triton.
    """
    pytest.importorskip("triton", reason="the kernels extra is not installed")
    prepare_interpreter()
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


@cache
def prepare_interpreter() -> None:
    """Lets Triton's interpreter work as a GPU does where it can, and leave out what it does again and again.

    Numbers of lanes that a mask leaves out may be anything, such as what was in the memory before, so numpy must not warn of
    them. At each call of a device function the interpreter replaces the builtins of triton.language, as the launch of the
    kernel has done already; and it makes a table of all types whenever it needs the type of an array: both together are a
    third of its time, and no result follows from them.
    """
    from triton import language
    from triton.runtime import interpreter

    replace_builtins, find_type = interpreter._patch_lang, interpreter._get_np_dtype
    launch = interpreter.GridExecutor.__call__
    types: dict[str, Any] = {}

    @cache
    def languages(function: Callable[..., Any]) -> list[ModuleType]:
        return [
            one for one in (language, language.core) if any(one is value for value in function.__globals__.values())
        ]

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(language.core.is_builtin(one.load) for one in languages(self.fn)):
            replace_builtins(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    def type_of(triton_type: Any) -> Any:
        element = triton_type.scalar
        if element.is_ptr():
            return find_type(element)
        if element.name not in types:
            types[element.name] = find_type(element)
        return types[element.name]

    @wraps(launch)
    def launch_quietly(*args: Any, **kwargs: Any) -> None:
        with np.errstate(all="ignore"):
            launch(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
    interpreter.GridExecutor.__call__ = launch_quietly
    interpreter._get_np_dtype = type_of


def add_in_one_order(patch: pytest.MonkeyPatch) -> None:
    """Lets interpreted products of matrices add in one order, as matrix units do. BLAS may add in another way in other
    rows of a tile, or in tiles of another size.
    """
    pytest.importorskip("triton", reason="the kernels extra is not installed")
    from triton.runtime import interpreter

    def create_dot(_: Any, a: Any, b: Any, total: Any, *__: Any) -> Any:
        products = np.zeros_like(total.data)
        for index in range(a.data.shape[1]):
            products += a.data[:, index, None] * b.data[index]
        return interpreter.TensorHandle(products + total.data, total.dtype.scalar)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
