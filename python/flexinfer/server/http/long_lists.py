"""LongLists: the lists of a request whose items are validated one by one, at a pace.

pydantic validates a whole request in one go: 16,384 parts of a message take 15 to 70 ms, for which
everybody waits. Objects that are validated before cost it nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_origin

from annotated_types import MaxLen
from pydantic import BaseModel, TypeAdapter, ValidationError

Pause = Callable[[], Awaitable[None]]
ITEMS_AT_ONCE = 16


@dataclass(frozen=True)
class LongList:
    """A field that may be a list of objects."""

    item: TypeAdapter[Any]
    kinds: tuple[type[BaseModel], ...]
    """What its items may be."""
    max_length: int | None
    """Longer ones are refused anyway, unread."""

    async def validate(self, values: Any, pause: Pause) -> bool:
        if not isinstance(values, list):
            return True
        if self.max_length is not None and len(values) > self.max_length:
            return False
        for idx, value in enumerate(values):
            kind = self._kind_of(value)
            if kind is not None and not await validate_lists(value, kind, pause):
                return False
            try:
                values[idx] = self.item.validate_python(value)
            except ValidationError:
                return False
            if idx % ITEMS_AT_ONCE == 0:
                await pause()
        return True

    def _kind_of(self, value: Any) -> type[BaseModel] | None:
        if not isinstance(value, dict):
            return None
        if len(self.kinds) == 1:
            return self.kinds[0]
        return next((kind for kind in self.kinds if _is_kind(value, kind)), None)


async def validate_lists(found: Any, kind: type[BaseModel], pause: Pause) -> bool:
    """Puts what was validated in the place of what was read, up to the first fault; whether there
    was none. Who then validates the whole finds the fault, and its place."""
    if not isinstance(found, dict):
        return True
    for name, one in _long_lists(kind).items():
        if name in found and not await one.validate(found[name], pause):
            return False
    return True


def prepare(kind: type[BaseModel]) -> None:
    """Make what validating a `kind` takes, which takes milliseconds."""
    for one in _long_lists(kind).values():
        for inner in one.kinds:
            prepare(inner)


@cache
def _long_lists(kind: type[BaseModel]) -> dict[str, LongList]:
    """By the name of the field."""
    lists = {}
    for name, field in kind.model_fields.items():
        for item, max_length in _lists_in(Annotated[field.annotation, *field.metadata, None]):
            models = tuple(models_in(item))
            if models:
                lists[field.alias or name] = LongList(TypeAdapter(item), models, max_length)
    return lists


def _lists_in(annotation: Any, max_length: int | None = None) -> Iterator[tuple[Any, int | None]]:
    """Types of the items of the lists that a field may be, and how many these may be."""
    if get_origin(annotation) is Annotated:
        annotation, *marks = get_args(annotation)
        marks = [one for mark in marks for one in getattr(mark, "metadata", (mark,))]
        lengths = (one.max_length for one in marks if isinstance(one, MaxLen))
        max_length = next(lengths, max_length)
        yield from _lists_in(annotation, max_length)
    elif get_origin(annotation) is list:
        yield get_args(annotation)[0], max_length
    elif get_origin(annotation) is not dict:
        for part in get_args(annotation):
            yield from _lists_in(part, max_length)


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Those of a union, or the one that it is."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)


def _is_kind(value: dict[str, Any], kind: type[BaseModel]) -> bool:
    """By the field `type`, which every kind has that stands beside others."""
    field = kind.model_fields["type"]
    named = get_args(field.annotation)
    return value.get("type", field.get_default()) in named
