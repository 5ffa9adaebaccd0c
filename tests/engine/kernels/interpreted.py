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

    Products of matrices add in one order, as matrix units do; BLAS may add in another way in other rows of a tile, in tiles
    of another size and on another processor. Numbers of lanes that a mask leaves out may be anything, such as what was in
    the memory before, so numpy does not warn of them.
    At each call of a device function the interpreter replaces the builtins of triton.language, as the launch of the kernel
    has done already; and it makes a table of all types whenever it needs the type of an array. Both are left out: they are
    a third of its time, and no result follows from them.
    """
    from triton import language
    from triton.runtime import interpreter

    replace_builtins, find_type = interpreter._patch_lang, interpreter._get_np_dtype
    launch, multiply = interpreter.GridExecutor.__call__, interpreter.InterpreterBuilder.create_dot
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

    def multiply_in_one_order(self: Any, a: Any, b: Any, total: Any, *more: Any) -> Any:
        if a.data.ndim > 2 or np.uint8 in (a.data.dtype, b.data.dtype):  # float8
            return multiply(self, a, b, total, *more)
        rows, columns = (np.ascontiguousarray(one.data, total.data.dtype) for one in (a, b))
        return interpreter.TensorHandle(np.einsum("ik,kj->ij", rows, columns) + total.data, total.dtype.scalar)

    interpreter.InterpretedFunction.__call__ = call
    interpreter.InterpreterBuilder.create_dot = multiply_in_one_order
    interpreter.GridExecutor.__call__ = launch_quietly
    interpreter._get_np_dtype = type_of
