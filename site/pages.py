"""Pages of the docs site that are made when it is built.

README.md                        ──► index.md
commands of `rllm.cli.main`      ──► reference/commands.md
sections of `TrainConfig`        ──► reference/configuration.md
names that `rllm` hands on       ──► reference/python.md, a directive a name
catalogue of benchmarks          ──► reference/benchmarks.md

A link of a page to a file outside of docs/ becomes the name of the file: the site does not hold it.
"""

import ast
import html
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click
from mkdocs.structure.files import File

import rllm
from rllm.cli.main import rllm as front_door
from rllm.config.schema import TrainConfig
from rllm.eval.catalogue import benchmarks

CHECKOUT = Path(__file__).resolve().parents[1]
HONOURED = {
    "torch": "src/rllm/trainer/backends/torch.py",
    "verl": "src/rllm/integrations/verl/kind.py",
    "tinker": "src/rllm/integrations/tinker/requirements.py",
}
"""Backend -> the file whose SUPPORTS says which keys of [model] and [optimizer] it honours."""
LINK = re.compile(r"\[([^]]*)\]\((\.\./[^)#]+)(?:#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add what is made here."""
    made = {
        "index.md": front_page(),
        "reference/commands.md": commands_page(),
        "reference/configuration.md": configuration_page(),
        "reference/python.md": python_page(),
        "reference/benchmarks.md": benchmarks_page(),
    }
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The text of a page, without links that leave the site, and without what our tests read behind the
    language of a block (`sh fails`): superfences takes such a line for text, and the next one for the
    beginning of a block.
    """
    markdown = re.sub(r"^(```\w+) .+$", r"\1", markdown, flags=re.MULTILINE)
    if page.file.src_uri == "index.md":
        return markdown
    return LINK.sub(lambda link: _inside(link) or f"{link[1]} (`{link[2].replace('../', '')}`)", markdown)


def _inside(link: re.Match[str]) -> str:
    return f"[{link[1]}](index.md)" if link[2] == "../README.md" else ""


def front_page() -> str:
    """README.md, whose links begin in docs/."""
    text = (CHECKOUT / "README.md").read_text().replace("](docs/", "](")
    return re.sub(r"\[([^]]*)\]\(([^):#]+)\)", _kept_inside, text)


def _kept_inside(link: re.Match[str]) -> str:
    is_outside = (CHECKOUT / link[2]).exists() and not (CHECKOUT / "docs" / link[2]).exists()
    return f"{link[1]} (`{link[2]}`)" if is_outside else link[0]


def commands_page() -> str:
    """Every command with its options, as click has them."""
    lines = [
        "# Commands",
        "",
        "Every command takes `--help`. What is here is made of the commands themselves.",
        "",
    ]
    for name, command in _commands(front_door, "rllm"):
        context = click.Context(command, info_name=name)
        lines += [f"## {name}", "", textwrap.dedent(command.help or "").replace("\b\n", ""), ""]
        lines += ["```text", command.get_usage(context).removeprefix("Usage: "), "```", ""]
        if rows := [row for each in command.get_params(context) if (row := each.get_help_record(context))]:
            lines += ["| option | |", "|---|---|"]
            lines += [f"| {_code(option)} | {_cell(text)} |" for option, text in rows]
            lines.append("")
    return "\n".join(lines)


def _commands(group: click.Group, name: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group, info_name=name)
    for word in group.list_commands(context):
        command = group.get_command(context, word)
        if isinstance(command, click.Group):
            yield from _commands(command, f"{name} {word}")
        elif command is not None and not command.hidden:
            yield f"{name} {word}", command


def configuration_page() -> str:
    """Every key of a training run: default, meaning, and the backends that honour it where not all do."""
    honoured = {backend: _supports(CHECKOUT / path) for backend, path in HONOURED.items()}
    lines = [
        "# Configuration",
        "",
        "Keys of `rllm train`, set by `--set section.key=value` or in the TOML file of `--config`. A backend",
        "that does not honour a key refuses it at start.",
        "",
        "## Top level",
        "",
    ]
    sections = [each for each in fields(TrainConfig) if _section_class(TrainConfig, each)]
    lines += _key_table(TrainConfig, "", {each.name for each in sections}, honoured)
    for section in sections:
        kind = _section_class(TrainConfig, section)
        assert kind is not None, "chosen so above"
        by_name = section.name in ("policies", "roles")
        lines += [f"## [{section.name}{'.NAME' if by_name else ''}]", "", _meaning(kind), ""]
        lines += _key_table(kind, f"{section.name}.", set(), honoured)
    return "\n".join(lines)


def _meaning(kind: Any) -> str:
    """The docstring of a dataclass; nothing for the signature that stands where there is none."""
    text = inspect.getdoc(kind) or ""
    return "" if text.startswith(f"{kind.__name__}(") else text


def _key_table(kind: Any, prefix: str, left_out: set[str], honoured: Mapping[str, set[str]]) -> list[str]:
    meanings = _field_docstrings(kind)
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for each in fields(kind):
        if each.name in left_out:
            continue
        key, meaning = f"{prefix}{each.name}", meanings.get(each.name, "")
        if prefix in ("model.", "optimizer."):
            backends = [name for name, keys in honoured.items() if key in keys]
            meaning += f" *Honoured by {', '.join(backends)}.*" if len(backends) < len(honoured) else ""
        lines.append(f"| `{key}` | {_code(_default(each))} | {_cell(meaning)} |")
    return [*lines, ""]


def _section_class(kind: Any, each: Field[Any]) -> Any:
    """The dataclass that a field holds, or a dict by name of; None for a plain value."""
    hint = get_type_hints(kind)[each.name]
    return next(
        (part for part in (hint, *get_args(hint)) if inspect.isclass(part) and is_dataclass(part)), None
    )


def _default(each: Field[Any]) -> str:
    if each.default is not MISSING:
        return repr(each.default)
    return repr(each.default_factory()) if each.default_factory is not MISSING else "required"


def _field_docstrings(kind: Any) -> dict[str, str]:
    """Field -> the text that stands below it in the source."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef), "a dataclass is a class"
    found: dict[str, str] = {}
    for above, below in zip(body.body, body.body[1:], strict=False):
        match above, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
            case _:
                pass
    return found


def _supports(path: Path) -> set[str]:
    """The names in SUPPORTS, read from the source: the package of the backend need not be installed."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "SUPPORTS":
            return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
    raise LookupError(f"{path} has no SUPPORTS")


def python_page() -> str:
    """What `import rllm` hands on."""
    named = [getattr(rllm, name) for name in sorted(dir(rllm)) if name[0].isalpha()]
    homes = [
        f"{each.__module__}.{each.__qualname__}"
        for each in named
        if callable(each) and each.__module__.startswith("rllm.")
    ]
    lines = ["# Python", "", "Names that `import rllm` hands on. Each room has more: see its `__init__`.", ""]
    for home in homes:
        lines += [f"::: {home}", ""]
    return "\n".join(lines)


def benchmarks_page() -> str:
    """The catalogue, by category."""
    lines = ["# Benchmarks", "", "Names for `rllm eval NAME`; `rllm benchmark info NAME` says more.", ""]
    every = benchmarks()
    for category in sorted({each.category for each in every}):
        lines += [f"## {category}", "", "| name | what it asks | without a network |", "|---|---|---|"]
        for each in every:
            if each.category == category:
                lines.append(
                    f"| `{each.name}` | {_cell(each.description)} | {'yes' if each.offline else ''} |"
                )
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Text of a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("[", "&#91;")


def _code(text: str) -> str:
    """The same in a typewriter's letters; between backticks a bar would keep its backslash."""
    return f"<code>{html.escape(' '.join(text.split())).replace('|', '&#124;')}</code>"
