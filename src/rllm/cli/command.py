"""The parts of every command: groups that suggest the nearest name, `--json`, one way to print JSON.

Imported by the front door, so it needs nothing heavier than click.
"""

import difflib
import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Any, Protocol

import click

from rllm.errors import choices_of
from rllm.types.chat_forms import AUTO, THINKING, TOOL_FORMS, ChatForm

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}

REASON_FILE = "RLLM_REASON_FILE"
"""Variable with the file that takes the error of a command instead of stderr: the process that started the
command prints it."""
_STARTED = "rllm.started"


def elapsed_s() -> float:
    """Seconds since the command was typed, which the shell tells as well."""
    return time.monotonic() - click.get_current_context().meta[_STARTED]


class Group(click.Group):
    """Lists its commands in the order they were written, and answers a misspelt one with the nearest."""

    successors: Mapping[str, str] = {}
    """Published commands that are not here -> what takes their place."""

    def __init__(self, *args: Any, successors: Mapping[str, str] | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.successors = successors or self.successors

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        started_s = time.monotonic()
        context = super().make_context(info_name, args, parent, **extra)
        context.meta.setdefault(_STARTED, started_s)
        return context

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in self.successors and self.get_command(ctx, name) is None:
            raise click.UsageError(
                f"`{ctx.command_path} {name}` has no counterpart: {self.successors[name]}.", ctx
            )
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            nearest = difflib.get_close_matches(name, self.list_commands(ctx), n=1)
            hint = (
                f"did you mean `{ctx.command_path} {nearest[0]}`?"
                if nearest
                else f"there are: {', '.join(self.list_commands(ctx))}."
            )
            raise click.UsageError(f"There is no command `{ctx.command_path} {name}`; {hint}", ctx)
        return super().resolve_command(ctx, args)


class WordChoice(click.Choice[str]):
    """One of some words; a misspelt one is answered with the nearest."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        return f"{value!r} is none of them; {choices_of(value, self.choices)}."


class WritableFile(click.Path):
    """A file to write, by its path: refused before any work where no directory is there to hold it, or where
    it is one."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path: Any = super().convert(value, param, ctx)
        if not path.parent.is_dir():
            self.fail(
                f"There is no directory {path.parent} for {path}; make it, or choose another.", param, ctx
            )
        return path


Decorate = Callable[[Callable[..., Any]], Callable[..., Any]]


def option(*flags: str, **settings: Any) -> Any:
    """A field of a dataclass of options, declared as by `click.option`; its name is the field's."""
    return field(metadata={"parameter": lambda name: click.option(*flags, name, **settings)})


def argument(**settings: Any) -> Any:
    """A field of a dataclass of options that is typed without a flag, as by `click.argument`."""
    return field(metadata={"parameter": lambda name: click.argument(name, **settings)})


def shared(parameter: Decorate) -> Any:
    """A field of a dataclass of options that several commands have; its name is the one declared there."""
    return field(metadata={"parameter": lambda name: parameter})


def options_of(kind: type[Any], *after: Decorate) -> Decorate:
    """Declares the fields of the dataclass `kind`; the command gets an instance of it as `options`.

    `after` are decorators whose own parameters come after them in --help; they see plain values, so they may
    change what the instance is made of.
    """
    names = [each.name for each in fields(kind)]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_options(*args: Any, **values: Any) -> Any:
            options = kind(**{name: values.pop(name) for name in names})
            return command(*args, options=options, **values)

        parameters = [each.metadata["parameter"](each.name) for each in fields(kind)]
        return functools.reduce(lambda inner, add: add(inner), reversed([*parameters, *after]), with_options)

    return decorate


recipe_option = click.option(
    "--recipe",
    type=WordChoice(["scratch", "pretrained"]),
    default=None,
    callback=lambda ctx, parameter, value: value or "",
    help="Prompts and settings of a benchmark: scratch is for models that rLLM made from random weights, "
    "pretrained has rules, room to think and no warm start.  [default: by the model]",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout; errors as JSON on stderr."
)


trust_option = click.option(
    "--trust-remote-code",
    is_flag=True,
    help="Run Python that the model's directory brings along. Read it first: it may do all that you may.",
)


tool_form_option = click.option(
    "--tool-form",
    type=WordChoice(TOOL_FORMS),
    default=AUTO,
    help="Form in which tools are offered: native, by the model's chat template, or as text in the system "
    "message.  [default: text where the template has no tools]",
)
chat_template_option = click.option(
    "--chat-template",
    default="",
    metavar="plain|chatml|FILE",
    help="Chat template of a base model, which has none, or one in place of the model's own.",
)
thinking_option = click.option(
    "--thinking",
    type=WordChoice(THINKING),
    default=AUTO,
    help="Whether a model that can think first does.  [default: as its chat template has it]",
)
max_thinking_tokens_option = click.option(
    "--max-thinking-tokens",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Close a thought after so many tokens.  [default: no limit]",
)


class FormOptions(Protocol):
    """Options of a command that say how conversations look."""

    @property
    def tool_form(self) -> str: ...
    @property
    def chat_template(self) -> str: ...
    @property
    def thinking(self) -> str: ...
    @property
    def max_thinking_tokens(self) -> int: ...


def chat_form(options: FormOptions) -> ChatForm:
    """The form of conversations that a command's options describe."""
    return ChatForm(
        tool_form=options.tool_form,
        chat_template=options.chat_template,
        thinking=options.thinking,
        max_thinking_tokens=options.max_thinking_tokens,
    )


def example(*lines: str) -> str:
    """An epilog that shows what to type, line by line as it is."""
    return "\n".join(["\b", "Example:", *(f"  {line}" for line in lines)])


_PLAIN_WORD = re.compile(r"\S+")
_WORD = re.compile(r"(?:[^\s`]|`[^`\n]*`|`)+")


def fold(text: str, width: int | None) -> str:
    """`text` with line ends in place of spaces, so that no line of a sentence is wider than `width`.

    A word that is longer stays whole, and so does what stands between two `: it may be a command to copy.
    None, of what is no terminal, folds nothing.
    """
    if width is None:
        return text
    words = [match.span() for match in _WORD.finditer(text)]
    characters, line_begin, before = list(text), 0, 0
    while words:
        begin, end = words.pop(0)
        parts = [match.span() for match in _PLAIN_WORD.finditer(text, begin, end)]
        if end - begin > width and len(parts) > 1:
            words[:0] = parts
            continue
        if "\n" in text[before:begin]:
            line_begin = text.rindex("\n", before, begin) + 1
        if end - line_begin > width and before > line_begin:
            characters[begin - 1], line_begin = "\n", begin
        before = end
    return "".join(characters)


def stderr_width() -> int | None:
    """Columns of the terminal that stderr is, or that COLUMNS says; None where nobody looks at one."""
    if os.environ.get("COLUMNS", "").isdecimal():
        return int(os.environ["COLUMNS"]) or None
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or None
    except (OSError, ValueError, AttributeError):
        return None


def print_json(value: Any) -> None:
    """One JSON object on stdout."""
    click.echo(json.dumps(value, indent=2, allow_nan=False, default=str).replace("\x7f", "\\u007f"))


def print_json_line(value: Any) -> None:
    """One JSON object on a line of stdout, in ASCII: for those that read a stream of them."""
    click.echo(json.dumps(value, allow_nan=False, default=str).replace("\x7f", "\\u007f"))
