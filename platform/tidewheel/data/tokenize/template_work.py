"""Jinja sandbox that counts the work of a chat template, so that no template can loop or allocate without bound.

    environment = bounded_environment()
    template = environment.from_string(source)
    with work_limit(limit):
        text = rendered(template, messages=...)   # raises TooMuchWork

Jinja's own sandbox denies access to files and to Python, but a template can still count to a trillion. Here every
operation whose cost a template can choose is charged before it runs, in units of a few nanoseconds: an iteration, by
the size of the loop's body; a call; and the characters and elements that an operator, filter, method or comparison
reads or creates. Counting does not change the output of a template.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from types import GeneratorType
from typing import Any

import jinja2.ext
import jinja2.nodes as nodes
import jinja2.sandbox
from jinja2.runtime import BlockReference, Context, Macro
from jinja2.visitor import NodeTransformer

WORK = 1 << 27
"""Units for an empty conversation: about a second, and at most half a gigabyte of memory."""
WORK_OF_INPUT = 256
"""Additional units for each character of the conversation."""
_NODE = 50
_CALL = 500
_MAX_ARGUMENT = 100_000
"""Larger widths, counts and ranges are refused. Jinja's sandbox has the same limit for `range`."""
_MAX_BITS = 1 << 14
# Names of filters that a template cannot spell.
_LOOP = "tidewheel: loop"
_SHALLOW = "tidewheel: shallow"
_DEEP = "tidewheel: deep"
_LAZY = frozenset({"length", "count", "first", "last", "default", "d", "list", "items", "select", "reject",
                   "selectattr", "rejectattr", "map", "batch", "slice", "reverse", "attr"})
"""Filters that read the elements of a value, but not their contents."""
_CHEAP_TESTS = frozenset({"none", "defined", "undefined", "string", "mapping", "iterable", "sequence", "number",
                          "boolean", "true", "false", "integer", "float", "callable", "filter", "test", "odd", "even"})


class TooMuchWork(jinja2.TemplateError):
    """Refusal of a template that does more work than its limit."""


class _Work:
    """Remaining units of a limit."""

    def __init__(self, units: int) -> None:
        self.left = units

    def charge(self, units: int) -> None:
        self.left -= units
        if self.left < 0:
            raise TooMuchWork("it loops or builds more than any chat template needs")


_current: contextvars.ContextVar[_Work] = contextvars.ContextVar("template work")


@contextlib.contextmanager
def work_limit(units: int) -> Iterator[None]:
    """Limit the work of templates in the block to `units`."""
    token = _current.set(_Work(units))
    try:
        yield
    finally:
        _current.reset(token)


def size(value: Any, most: int = WORK) -> int:
    """Return the size of a value in units. Shared elements count each time; counting stops above `most`."""
    total = 0
    pending = [value]
    while pending and total <= most:
        item = pending.pop()
        if isinstance(item, (str, bytes)):
            total += len(item)
        elif isinstance(item, (list, tuple, set, frozenset)):
            total += _NODE * len(item)
            if total <= most:
                pending += item
        elif isinstance(item, dict):
            total += _NODE * len(item)
            if total <= most:
                pending += item
                pending += item.values()
        elif isinstance(item, int):
            total += item.bit_length()
    return total


def rendered(template: jinja2.Template, **values: Any) -> str:
    """Return the template's output, within the caller's `work_limit`."""
    pieces: list[str] = []
    work = _current.get()
    for piece in template.generate(**values):
        work.charge(len(piece) + _NODE)
        pieces.append(piece)
    return "".join(pieces)


def bounded_environment(filters: Mapping[str, Callable[..., Any]],
                        extensions: Iterable[type[jinja2.ext.Extension]] = ()) -> jinja2.Environment:
    """Return an environment like that of `transformers`. Its templates run only within `work_limit`.

    Args:
        filters: filters to add or to replace.
        extensions: extensions to add.
    """
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, finalize=_output, optimized=False,
                               extensions=[*extensions, jinja2.ext.loopcontrols])
    environment.globals.pop("lipsum")  # random
    environment.filters.update(filters)
    added: list[tuple[str, Any]] = list(environment.filters.items())
    for name, function in added:
        environment.filters[name] = _charged(name, function, _charge_growing)
    tests: list[tuple[str, Any]] = list(environment.tests.items())
    for name, function in tests:
        if name not in _CHEAP_TESTS:
            environment.tests[name] = _charged(name, function, _charge_sizes)
    environment.filters.update({_LOOP: _loop, _SHALLOW: _shallow, _DEEP: _deep})
    return environment


def _charged(name: str, function: Callable[..., Any], charge: Callable[..., None]) -> Callable[..., Any]:
    """Return a filter or test that charges for its arguments and its result."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def charged(*args: Any, **kwargs: Any) -> Any:
        work = _current.get()
        value = args[first] if len(args) > first else None
        if isinstance(value, GeneratorType):
            value = _counted(value, work, _NODE)
            if name not in _LAZY:
                value = list(value)
        charge(work, name, value, [*args[first + 1 :], *kwargs.values()])
        result = function(*args[:first], value, *args[first + 1 :], **kwargs)
        work.charge(_length(result))
        return result
    return charged


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        self.source_length = max(len(source), getattr(self, "source_length", 0))
        tree: nodes.Template = _Charging().visit(template)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _charge_operator(_current.get(), operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        work = _current.get()
        arguments = [*args, *kwargs.values()]
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        if isinstance(__obj, (Macro, BlockReference)):
            work.charge(_CALL + __self.source_length)
        elif isinstance(owner := getattr(method, "__self__", None), (str, bytes, int, list, tuple, dict)):
            _charge_growing(work, method.__name__, owner, arguments)
        else:
            _charge_sizes(work, "", None, arguments)
        result = super().call(__context, __obj, *args, **kwargs)
        work.charge(_length(result))
        return result


class _Charging(NodeTransformer):
    """Transformer that adds charges to nodes of variable cost, other than operators, calls, filters and tests."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise jinja2.TemplateSyntaxError("a recursive loop is not allowed in a chat template", node.lineno)
        inner = [*node.body, *([node.test] if node.test else [])]
        text = sum(len(data.data) for part in inner for data in [part, *part.find_all(nodes.TemplateData)]
                   if isinstance(data, nodes.TemplateData))
        count = sum(1 + sum(1 for _ in part.find_all(nodes.Node)) for part in inner)
        node = self._visited(node)
        iterated: Any = node.iter
        node.iter = _filter(iterated, _LOOP, nodes.Const(_CALL + _NODE * count + text))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        node = self._visited(node)
        node.nodes = [_filter(part, _DEEP) for part in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        node = self._visited(node)
        for operand in node.ops:
            operand.expr = _filter(operand.expr, _SHALLOW if operand.op in ("in", "notin") else _DEEP)
        if any(operand.op not in ("in", "notin") for operand in node.ops):
            node.expr = _filter(node.expr, _DEEP)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        node = self._visited(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filter(node.node, _SHALLOW)
        return node

    def _visited(self, node: Any) -> Any:
        return self.generic_visit(node)


def _filter(node: nodes.Expr, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(arguments), [], None, None, lineno=node.lineno)


@jinja2.pass_context
def _loop(context: Context, iterable: Any, weight: int) -> Any:
    """Charge for a loop: at once if its length is known, otherwise for each iteration."""
    work = _current.get()
    if isinstance(iterable, Sized):
        work.charge(weight * len(iterable))
        return iterable
    return _counted(iterable, work, weight)


def _counted(iterable: Iterable[Any], work: _Work, weight: int) -> Iterator[Any]:
    for item in iterable:
        work.charge(weight)
        yield item


@jinja2.pass_context
def _shallow(context: Context, value: Any) -> Any:
    _current.get().charge(_length(value))
    return value


@jinja2.pass_context
def _deep(context: Context, value: Any) -> Any:
    if not isinstance(value, (bool, float, type(None))):
        work = _current.get()
        work.charge(size(value, work.left))
    return value


@jinja2.pass_context
def _output(context: Context, value: Any) -> Any:
    work = _current.get()
    work.charge(_NODE + size(value, work.left))
    return value


def _length(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    return _NODE * (1 + len(value)) if isinstance(value, (list, tuple, dict, range)) else _NODE


def _charge_operator(work: _Work, operator: str, left: Any, right: Any) -> None:
    for operand in (left, right):
        if isinstance(operand, int) and operand.bit_length() > _MAX_BITS:
            raise TooMuchWork(f"a number of {operand.bit_length()} bits")
    if operator == "**" and isinstance(left, int) and isinstance(right, int):
        if left.bit_length() * abs(right) > _MAX_BITS:
            raise TooMuchWork("a power with too many digits")
    elif operator == "*":
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, (str, bytes, list, tuple)) and isinstance(times, int):
                work.charge(len(sequence) * max(times, 0))
    elif operator == "%" and isinstance(left, (str, bytes)):
        _check_widths(left, (right,))
        work.charge(len(left) + size(right, work.left))
    else:
        work.charge(_length(left) + _length(right))


def _charge_sizes(work: _Work, name: str, value: Any, arguments: list[Any]) -> None:
    work.charge(_CALL + sum(size(argument, work.left) for argument in (value, *arguments)))


def _charge_growing(work: _Work, name: str, value: Any, arguments: list[Any]) -> None:
    """Charge for a filter, or a method of a built-in type: for its inputs and the largest possible result."""
    lazy = name in _LAZY or isinstance(value, dict)
    value_size = _length(value) if lazy else size(value, work.left)
    work.charge(value_size)
    _charge_sizes(work, name, None, arguments)
    _check_numbers(arguments)
    numbers = sum(max(argument, 0) for argument in arguments if isinstance(argument, int))
    texts = sum(_length(argument) for argument in arguments if not isinstance(argument, int))
    text = value if isinstance(value, str) else ""
    if name in ("format", "format_map"):
        _check_widths(value, arguments)
    elif name == "replace":
        old, new = [*arguments, "", ""][:2]
        times = text.count(old) if isinstance(old, str) and text else value_size
        work.charge(times * _length(new))
    elif name in ("indent", "expandtabs"):
        work.charge((1 + text.count("\n") + text.count("\t")) * (numbers + texts))
    elif name == "striptags":
        work.charge((1 + text.count("<!--")) * value_size)
    elif name == "tojson":
        work.charge(value_size * (numbers + texts))
    elif name == "sum" and texts:  # concatenates lists from left to right
        work.charge(_length(value) * value_size)
    elif name in ("join", "wordwrap", "urlize", "translate", "xmlattr"):
        work.charge(_length(value) * texts)
    else:
        work.charge(numbers)


def _check_widths(pattern: str | bytes, values: Iterable[Any]) -> None:
    """Refuse a format with a large width, written in the pattern or taken from a value."""
    text = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
    if re.search(r"[0-9]{6}", text):
        raise TooMuchWork("a format with a width of more than 99999")
    if re.search(r"%[^a-zA-Z%]*\*|\{[^{}]*\{", text):
        for value in values:
            _check_numbers(value if isinstance(value, (list, tuple)) else [value])


def _check_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > _MAX_ARGUMENT:
            raise TooMuchWork(f"the argument {value} is greater than {_MAX_ARGUMENT}")
