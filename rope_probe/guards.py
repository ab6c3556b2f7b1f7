"""What does a layer's own code do with the rotation?  Answered from the source of its forward method.

Families with layers that do not rotate (NoPE) each spell it differently: an attribute, a window
that is or is not set.  Rather than a table of families, the calls that rotate are found in the source
of the attention class, and the `if`s around them are evaluated on the module.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache


def _is_rotation(call: ast.Call) -> str | None:
    name = str(getattr(call.func, "id", None) or getattr(call.func, "attr", ""))
    return name if name.startswith("apply_rotary") or name == "rotary_fn" else None


def _holds(test: ast.expr, module) -> bool | None:
    """Value of a condition on the module itself; None for one on call arguments, known only while running."""
    names = {child.id for child in ast.walk(test) if isinstance(child, ast.Name)}
    if names != {"self"} or any(isinstance(child, ast.Call) for child in ast.walk(test)):
        return None
    code = compile(ast.Expression(test), "<guard>", "eval")
    try:
        return bool(eval(code, {"__builtins__": {}}, {"self": module}))  # noqa: S307 - the class's own test
    except Exception:  # an attribute the class does not have in this configuration
        return None


def _rotations(node: ast.AST, module) -> Iterator[str]:
    """Names of the rotation functions called below a node, without the branches that cannot be taken."""
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.If):
        holds = _holds(node.test, module)
        children = [*(node.body if holds is not False else ()), *(node.orelse if holds is not True else ())]
    elif isinstance(node, ast.Call) and (name := _is_rotation(node)):
        yield name
    for child in children:
        yield from _rotations(child, module)


@cache
def _forward(cls) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(cls.forward)))
    except (OSError, TypeError, SyntaxError):
        return None


def rotates_by_guard(module) -> bool:
    """True unless conditions on the module itself keep its forward from rotating.

    A condition on anything but the module (a call argument) cannot be known without running;
    the layer is then taken to rotate, and a live model corrects it by measurement.
    """
    tree = _forward(type(module))  # type: ignore[arg-type]
    if tree is None or not any(isinstance(node, ast.Call) and _is_rotation(node) for node in ast.walk(tree)):
        return True
    return any(True for _ in _rotations(tree, module))


def deinterleaves(module) -> bool:
    """Does its forward bring interleaved pairs into half-split order while it rotates them (DeepSeek-V3)?"""
    tree = _forward(type(module))  # type: ignore[arg-type]
    return tree is not None and any(name.endswith("_interleave") for name in _rotations(tree, module))
