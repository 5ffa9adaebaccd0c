"""Pure forwards: functions whose whole body passes their own parameters on to one other function.

    python benchmarks/forwards.py [--package DIR]      # lists all of a package

A body of one `return`, `await`, `yield from` or expression statement, beside a docstring, is a forward if it is a call
all of whose arguments are the function's own parameters, each as it came. A call of a class is none: it makes a thing.
"""

import argparse
import ast
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

_PACKAGE = Path(__file__).parents[1] / "src" / "graftwork"

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def forwards_of(path: Path) -> Iterator[FunctionNode]:
    """The forwards of one file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, FunctionNode) and is_forward(node):
            yield node


def first_line(node: FunctionNode) -> int:
    """As code objects count it: a function begins with its first decorator."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def is_forward(node: FunctionNode) -> bool:
    call = _only_call(node)
    if call is None or _makes_object(call):
        return False
    parameters = _parameters(node)
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    return all(_passes_on(value, parameters) for value in values)


def longest_chain(forwards: Collection[int], calls: Mapping[int, Collection[int]]) -> list[int]:
    """The longest way from forward to forward along `calls`; a forward counts only if it calls something of ours."""
    best: dict[int, list[int]] = {}

    def chain_from(place: int, above: frozenset[int]) -> list[int]:
        if place not in best:
            callees = [callee for callee in calls.get(place, ()) if callee in forwards and callee not in above]
            tails = [chain_from(callee, above | {place}) for callee in callees]
            best[place] = [place, *max(tails, key=len, default=[])]
        return best[place]

    chains = [chain_from(place, frozenset()) for place in forwards if calls.get(place)]
    return max(chains, key=len, default=[])


def _only_call(node: FunctionNode) -> ast.Call | None:
    """The call that is all of a function's body."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr):
        return None
    value = body[0].value
    if isinstance(value, ast.Await | ast.YieldFrom):
        value = value.value
    return value if isinstance(value, ast.Call) else None


def _makes_object(call: ast.Call) -> bool:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name.lstrip("_")[:1].isupper() or name == "cls"


def _parameters(node: FunctionNode) -> set[str]:
    given = node.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return {parameter.arg for parameter in named if parameter is not None}


def _passes_on(value: ast.expr, parameters: set[str]) -> bool:
    bare = value.value if isinstance(value, ast.Starred) else value
    return isinstance(bare, ast.Name) and bare.id in parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, default=_PACKAGE)
    package = parser.parse_args().package
    for room in sorted(package.iterdir()):  # a room is a symlink, which `rglob` does not follow from above
        for path in sorted(room.rglob("*.py")) if room.is_dir() else ():
            for node in forwards_of(path):
                print(f"{path.relative_to(package)}:{first_line(node)}  {node.name}")


if __name__ == "__main__":
    main()
