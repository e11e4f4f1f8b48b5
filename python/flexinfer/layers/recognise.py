"""Whether a module's code is known: its class's forward, with all that it calls, as one text.

transformers writes the same layer once for each family. What may differ is brought into one form:
1. annotations, docstrings, defaults of forward and harmless decorators are left out;
2. a condition that reads only the module (`if self.config.clip_qkv is not None`) is decided;
3. attention options that read only the module are left out: they are probed;
4. dropout is left out: models are in evaluation mode;
5. a cache has the name that transformers gives it since 5.24, and is told no more than before.
Everything else must be equal to a text in `known.py`. No name of a class or a child decides, and
what depends on data (a clamp, a comparison) is in the text. A function around which others than
transformers and torch have put something is not known; one that is no longer what was read is read
anew.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple, TypeGuard

import torch

from flexinfer.runtime.cache_argument import today

OPTIONS = frozenset({"dropout", "scaling", "sliding_window", "softcap", "s_aux"})
HARMLESS_DECORATORS = frozenset({"deprecate_kwarg", "torch.no_grad", "use_kernel_forward_from_hub"})
"""The last replaces code only in models that are kernelised on purpose."""
INNOCENT_FUNCTIONS = frozenset({"eager_attention_forward"})
"""Named, and not called: the engine attends through its own function."""
LIBRARIES = frozenset({"transformers", "torch"})
"""Their wrappers change nothing that is computed here."""


def is_known(module: torch.nn.Module, known: Iterable[str]) -> bool:
    """Whether the module computes what one of these texts does, and nobody watches it."""
    if not is_plain(module):
        return False
    forward = inspect.unwrap(type(module).forward)
    names = forward.__code__.co_names if isinstance(forward, FunctionType) else ()
    candidates = [text for text in known if _attributes(text).issubset(names)]
    if not candidates:
        return False  # told without reading the source, as most are
    code = code_of(module)
    return code is not None and code in map(_normalised, candidates)


def is_plain(module: torch.nn.Module) -> bool:
    """Whether it computes what its class says: nobody watches it or has changed its forward."""
    return "forward" not in vars(module) and not is_watched(module)


def is_watched(module: torch.nn.Module) -> bool:
    """Whether a hook waits in it or in a module below: a replacement would not call it."""
    return any(hooks_of(module.modules()))


def weights_read_by(module: torch.nn.Module) -> frozenset[str]:
    """Modules below it, by their paths, whose weights its forward computes with by itself: they
    stay as they are. LongCat's router does so with its classifier, Gemma 4 with the embedding of
    its language model."""
    forward = inspect.unwrap(type(module).forward)
    names = forward.__code__.co_names if isinstance(forward, FunctionType) else ()
    children = module._modules.keys() & set(names)
    if "weight" not in names or not children:
        return frozenset()  # told without reading the source, as most are
    tree = tree_of(forward)
    nodes = [] if tree is None else list(ast.walk(_Form(module).visit(tree)))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    of_no_numbers = {id(node.value) for node in attributes if node.attr in ("dtype", "device")}
    owners = [
        ast.unparse(node.value)
        for node in attributes
        if node.attr == "weight" and id(node) not in of_no_numbers
    ]
    paths = [owner.removeprefix("self.") for owner in owners if owner.startswith("self.")]
    return frozenset(path for path in paths if path.partition(".")[0] in children)


def modules_read_by(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Those of `weights_read_by`."""
    below = dict(module.named_modules()) if (paths := weights_read_by(module)) else {}
    return [below[path] for path in sorted(paths) if path in below]


def hooks_of(modules: Iterable[torch.nn.Module]) -> list[Mapping[int, Any]]:
    """Where their hooks are, and will be; empty ones are none."""
    return [hooks for m in modules for hooks in (m._forward_pre_hooks, m._forward_hooks)]


def chain_of(function: Any) -> list[Any]:
    """The function and what it wraps, up to the code that was written."""
    chain = [function]
    while (function := getattr(function, "__wrapped__", None)) is not None:
        chain.append(function)
    return chain


def is_of_library(function: Any) -> bool:
    module: str = getattr(function, "__globals__", {}).get("__name__", "")
    return module.partition(".")[0] in LIBRARIES


class _Found(NamedTuple):
    """A function, and where it was found."""

    owner: Any
    """A class, or the globals of a file."""
    name: str
    function: Callable[..., Any]

    def is_still_there(self) -> bool:
        return _look_up(self.owner, self.name) is self.function


class _Code(NamedTuple):
    text: str | None
    functions: list[_Found]
    """All that it was read from: somebody may put others there."""


_codes: dict[type, _Code] = {}
"""Of classes whose code reads the same for all their modules."""


def code_of(module: torch.nn.Module) -> str | None:
    """Its forward and the functions that it calls; None: there is no source to read."""
    code = _codes.get(type(module))
    if code is not None and all(found.is_still_there() for found in code.functions):
        return code.text
    form = _Form(module)
    functions = [_Found(type(module), "forward", type(module).forward)]
    text = _code(module, form, functions)
    if not form.has_decided:
        _codes[type(module)] = _Code(text, functions)
    return text


def _code(module: torch.nn.Module, form: _Form, functions: list[_Found]) -> str | None:
    """functions: its forward, to which those that it calls are added."""
    texts: list[str] = []
    seen: set[Callable[..., Any]] = set()
    for found in functions:
        *wrappers, function = chain_of(found.function)
        if not all(map(is_of_library, wrappers)):
            return None
        if function in seen:
            continue
        seen.add(function)
        node = tree_of(function)
        if node is None:
            return None
        if not texts:
            node.args.defaults, node.args.kw_defaults = [], [None] * len(node.args.kwonlyargs)
        node = form.visit(node)
        texts.append(ast.unparse(node))
        functions += _called(node, function, module)
    return "\n".join(texts)


def tree_of(function: Any) -> ast.FunctionDef | None:
    """Its source, read anew; None: there is none."""
    source = _source_of(inspect.unwrap(function))
    node = None if source is None else ast.parse(source).body[0]
    return node if isinstance(node, ast.FunctionDef) else None


@cache
def _source_of(function: Any) -> str | None:
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return None


@cache
def _normalised(text: str) -> str:
    """A text of `known.py` as `code_of` writes it."""
    return "\n".join(ast.unparse(node) for node in ast.parse(text).body)


@cache
def _attributes(text: str) -> frozenset[str]:
    """What a known forward reads of its module."""
    nodes = ast.walk(ast.parse(text).body[0])
    reads = (node for node in nodes if isinstance(node, ast.Attribute))
    return frozenset(node.attr for node in reads if ast.unparse(node.value) == "self")


def _called(tree: ast.AST, function: Any, module: torch.nn.Module) -> list[_Found]:
    """The functions of its file and the methods of the module that the tree calls."""
    called: list[_Found] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        owner: Any = None
        if isinstance(node.func, ast.Name) and node.func.id not in INNOCENT_FUNCTIONS:
            owner, name = function.__globals__, node.func.id
        elif isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "self":
            owner, name = type(module), node.func.attr
        found = None if owner is None else _look_up(owner, name)
        if isinstance(found, FunctionType):
            called.append(_Found(owner, name, found))
    return called


def _look_up(owner: Any, name: str) -> Any:
    return owner.get(name) if isinstance(owner, dict) else getattr(owner, name, None)


class _Form(ast.NodeTransformer):
    """Brings a function into the form that families share; see the file's head."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.has_decided = False
        """Whether a condition or dropout was decided: another module of its class may differ."""
        self._module = module
        self._names = {"self": module, "getattr": getattr, "hasattr": hasattr}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        node.returns = None
        node.decorator_list = [d for d in node.decorator_list if not _is_harmless(d)]
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        node.arg = today(node.arg)
        return node

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = today(node.id)
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.keyword:
        self.generic_visit(node)
        node.arg = None if node.arg is None else today(node.arg)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if node.value is None:
            return node
        assign = ast.Assign(targets=[node.target], value=node.value, lineno=node.lineno)
        return self.visit_Assign(assign)

    def visit_Assign(self, node: ast.Assign) -> ast.Assign | None:
        self.generic_visit(node)
        return None if self._is_idle_dropout(node) else node

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        value = self._value(node.test)
        if value is None:
            return node
        return node.body if value else node.orelse

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        value = self._value(node.test)
        if value is None:
            return node
        return node.body if value else node.orelse

    def visit_Call(self, node: ast.Call) -> ast.Call:
        if ast.unparse(node.func) == "attention_interface":
            node.keywords = [
                keyword
                for keyword in node.keywords
                if keyword.arg not in OPTIONS or not self._reads_only_the_module(keyword.value)
            ]
        self.generic_visit(node)
        if ast.unparse(node.func) == "cache.update":  # paged ones alone read them
            node.keywords = [k for k in node.keywords if ast.unparse(k) != "kwargs=kwargs"]
        return node

    def _is_idle_dropout(self, node: ast.Assign) -> bool:
        """Whether this is `x = dropout(x, ..., training=self.training)`, out of training."""
        call = node.value
        if not isinstance(call, ast.Call) or not ast.unparse(call.func).endswith(".dropout"):
            return False
        whether = [ast.unparse(k.value) for k in call.keywords if k.arg == "training"]
        is_same = ast.unparse(call.args[0]) == ast.unparse(node.targets[0])
        if not is_same or whether != ["self.training"]:
            return False
        self.has_decided = True
        return not self._module.training

    def _reads_only_the_module(self, node: ast.expr) -> bool:
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and part.id not in self._names:
                return False
            if isinstance(part, ast.Call) and not isinstance(part.func, ast.Name):
                return False
        return True

    def _value(self, node: ast.expr) -> bool | None:
        """What the module says to this condition; None: it hangs on more, or on what this module
        lacks, in a branch that it does not reach."""
        parts = node.values if _is_and(node) else []
        if any(self._value(part) is False for part in parts):
            return False  # Mamba-2 asks whether it trains, and whether there is a cache
        if not self._reads_only_the_module(node):
            return None
        self.has_decided = True
        try:
            return bool(eval(ast.unparse(node), dict(self._names)))
        except (AttributeError, LookupError, TypeError):
            return None


def _is_and(node: ast.expr) -> TypeGuard[ast.BoolOp]:
    return isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And)


def _is_harmless(decorator: ast.expr) -> bool:
    name = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(name) in HARMLESS_DECORATORS
