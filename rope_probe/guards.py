"""Does a layer rotate?  Answered by the condition in its own forward method.

Families with layers that do not rotate (NoPE) each spell it differently: an attribute, a window
that is or is not set.  Rather than a table of families, the `if` that guards the rotation is found
in the source of the attention class and evaluated on the module.
"""

from __future__ import annotations

import ast
import inspect
import textwrap


def _calls_rotation(nodes) -> bool:
    for node in nodes:
        for child in ast.walk(node):
            if isinstance(child, ast.Call):
                function = child.func
                name = getattr(function, "id", None) or getattr(function, "attr", "")
                if name.startswith("apply_rotary") or name == "rotary_fn":
                    return True
    return False


def rotates_by_guard(module) -> bool:
    """True unless a condition on the module itself keeps its forward from rotating.

    A condition on anything but the module (a call argument) cannot be known without running;
    the layer is then taken to rotate, and a live model corrects it by measurement.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(type(module).forward)))
    except (OSError, TypeError, SyntaxError):
        return True
    for node in ast.walk(tree):
        if not isinstance(node, ast.If) or not _calls_rotation(node.body) or _calls_rotation(node.orelse):
            continue
        names = {child.id for child in ast.walk(node.test) if isinstance(child, ast.Name)}
        if names != {"self"} or any(isinstance(child, ast.Call) for child in ast.walk(node.test)):
            continue
        code = compile(ast.Expression(node.test), "<guard>", "eval")
        try:
            return bool(eval(code, {"__builtins__": {}}, {"self": module}))  # noqa: S307 - the class's own test
        except AttributeError:
            continue
    return True
