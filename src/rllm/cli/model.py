"""`rllm model`: models on servers by names of your own, and model directories on this machine."""

from pathlib import Path
from typing import Any

import click

from rllm.build.models import (
    architecture_of,
    create_builtin,
    local_model_path,
    model_description,
    model_directory,
)
from rllm.cli.command import Group, example, json_option, print_json, trust_option
from rllm.cli.model_files import export, import_model, pull, push
from rllm.cli.model_setup import list_models, remove, setup, show, swap, test
from rllm.cli.terminal import facts, out, print_next
from rllm.errors import ArchitectureError


@click.group("model", cls=Group)
def command() -> None:
    """Set up models on servers, pull or create small ones here, and say what one holds."""


for subcommand in (setup, list_models, show, swap, test, remove, pull, push, import_model, export):
    command.add_command(subcommand)


@command.command(
    "create",
    epilog=example("rllm model create tiny-0 --preset tiny --seed 0", "rllm model create big --preset 100m"),
)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--preset", default="tiny", show_default=True, help="Size by name; a wrong one lists them.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Seed of the random weights.",
)
@json_option
def create(directory: Path, preset: str, seed: int, as_json: bool) -> None:
    """Write a built-in model with random weights and its tokenizer to DIRECTORY, in Hugging Face format.

    DIRECTORY must be absent or empty. transformers loads it with AutoModelForCausalLM and AutoTokenizer; one
    that reads images, such as tiny-vl, with AutoModelForImageTextToText and AutoProcessor.
    """
    create_builtin(directory, preset, seed)
    description = model_description(directory)
    if as_json:
        print_json(description)
        return
    _print_description(description)
    print_next(
        out(),
        [
            (["rllm", "train", "frozenlake", "--set", f"model.path={directory}"], "train it"),
            (["rllm", "eval", "frozenlake", "--model", str(directory)], "measure it as it is"),
        ],
    )


@command.command(
    "info", epilog=example("rllm model info runs/frozenlake-seed0", "rllm model info tiny-0 --json")
)
@click.argument("model")
@trust_option
@json_option
@click.pass_context
def info(ctx: click.Context, model: str, trust_remote_code: bool, as_json: bool) -> None:
    """Say what a model is: architecture, size, vocabulary, context, end tokens, and what serves it here.

    MODEL is a run, for its trained model, a directory, or a name. The weights are read, so a damaged file is
    found. Ends with 1 where the built-in engine does not compute the architecture as transformers does, and
    says why.
    """
    directory = model_directory(local_model_path(model))
    try:
        description = model_description(directory, trust_remote_code=trust_remote_code)
    except ArchitectureError as error:
        _print_refused(directory, str(error), as_json)
        ctx.exit(1)
    if as_json:
        print_json(description)
        return
    _print_description(description)
    print_next(out(), [(["rllm", "eval", "frozenlake", "--model", str(model)], "measure it")])


def _print_refused(directory: Path, reason: str, as_json: bool) -> None:
    architecture = architecture_of(directory)
    if as_json:
        print_json(
            {"model": str(directory), "architecture": architecture, "served_by": "", "refused": reason}
        )
        return
    console = out()
    console.print(str(directory), style="bold", soft_wrap=True)
    console.print(facts([("architecture", architecture), ("refused", reason)]))


_TOOLS = {
    "native": "native, by the chat template",
    "text": "text, in the system message: the chat template has none",
}
"""Each form of tools in words."""


def _tools_in_words(tools: dict[str, str]) -> str:
    return f"{_TOOLS[tools['form']]}; calls: {tools['calls']}"


def _template_in_words(description: dict[str, Any]) -> str:
    if not description["chat_template"]:
        return (
            "none, as of a base model: /v1/completions works as it is; eval, train and chat need "
            f"--chat-template {'|'.join(description['named_templates'])}|FILE"
        )
    if description["incremental_template"]:
        return "incremental: a conversation is one token row"
    return "not incremental: it rewrites earlier turns, so every turn is a segment of its own"


def _print_description(description: dict[str, Any]) -> None:
    ends = ", ".join(f"{text} ({token})" for token, text in description["end_tokens"].items())
    console = out()
    console.print(description["model"], style="bold", soft_wrap=True)
    console.print(
        facts(
            [
                ("architecture", description["architecture"]),
                ("parameters", f"{description['parameters']:,}"),
                *(
                    []
                    if description["by_row"]
                    else [
                        (
                            "shape",
                            f"{description['layers']} layers, {description['key_value_heads']} key-value "
                            f"heads of {description['head_dim']}",
                        )
                    ]
                ),
                ("vocabulary", f"{description['vocabulary']:,} tokens"),
                ("context", f"{description['context']:,} tokens"),
                ("reads", "text and images" if description["reads_images"] else "text"),
                ("end tokens", ends),
                (
                    "served by",
                    "the built-in decoder"
                    if description["served_by"] == "built-in decoder"
                    else "transformers' own code, row by row with its own cache: as exact, and much slower; "
                    f"{description['by_row']}"
                    if description["by_row"]
                    else "transformers' own code, through the same engine: as exact, and slower",
                ),
                ("sampled, trained, exported", description["row"]),
                ("chat template", _template_in_words(description)),
                *([("tools", _tools_in_words(description["tools"]))] if description["chat_template"] else []),
            ]
        )
    )
