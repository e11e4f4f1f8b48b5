"""Commands whose options are the fields of a dataclass: an option is one field, in one place.

    @dataclass(frozen=True, kw_only=True)
    class Limits:
        panel: ClassVar[str] = "Limits"
        max_n: Annotated[int | None, option("Maximum number of samples.", min=1)] = None

A field's name gives the flag (`--max-n`, or `--compile/--no-compile` for a bool), and in a class
with `env_prefix` the environment variable. The class that declares a field gives its panel.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer

Options = TypeVar("Options")


@dataclasses.dataclass(frozen=True)
class OptionText:
    """What a field cannot say of its option by name, type and default."""

    text: str | None
    flags: tuple[str, ...]
    settings: dict[str, Any]


def option(text: str | None = None, *flags: str, **settings: Any) -> OptionText:
    """An option's help; `flags` in place of those made from the name; `settings`: typer's."""
    return OptionText(text, flags, settings)


def command_of(options: type[Options], run: Callable[[Options], None]) -> Callable[..., None]:
    """A function for typer with a parameter per field of `options`. It calls `run`, and has its
    name and docstring. Fields that typer itself describes, such as arguments, stay as they are."""
    hints = get_type_hints(options, include_extras=True)
    fields: tuple[Any, ...] = dataclasses.fields(options)  # type: ignore[arg-type]
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default_of(field),
            annotation=_annotation(options, field.name, hints[field.name]),
        )
        for field in fields
    ]

    def command(**given: Any) -> None:
        run(options(**given))

    command.__name__, command.__doc__ = run.__name__, run.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def _default_of(field: dataclasses.Field[Any]) -> Any:
    """Without one the option must be given."""
    return inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default


def _annotation(options: type, name: str, hint: Any) -> Any:
    kind, *extras = get_args(hint)
    text = extras[0]
    if not isinstance(text, OptionText):
        return hint
    owner: Any = next(
        one for one in options.__mro__ if name in vars(one).get("__annotations__", ())
    )
    settings = {"rich_help_panel": getattr(owner, "panel", None), **text.settings}
    prefix = getattr(options, "env_prefix", None)
    if prefix is not None:
        settings |= {"envvar": prefix + name.upper(), "show_envvar": False}
    flags = text.flags or _flags(name, kind in (bool, bool | None))
    return Annotated[kind, typer.Option(*flags, help=text.text, **settings)]


def _flags(name: str, is_switch: bool) -> tuple[str, ...]:
    words = name.replace("_", "-")
    return (f"--{words}/--no-{words}",) if is_switch else (f"--{words}",)
