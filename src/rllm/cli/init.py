"""`rllm init`: a small project of one's own, with an agent, an evaluator, data, settings and a test.

project/*.txt ──► DIR: agent.py, evaluator.py, data/, config.toml, test_project.py, README.md ──► rllm train
"""

import shlex
from importlib import resources
from pathlib import Path

import click

from rllm.cli.command import example, json_option, print_json
from rllm.cli.published_flags import INIT_REFUSED, refused_options
from rllm.cli.terminal import out, print_next, print_sentence
from rllm.errors import ConfigError
from rllm.files.atomic import StorageErrors

FILES = {
    "README.md": "README.md.txt",
    "agent.py": "agent.py.txt",
    "evaluator.py": "evaluator.py.txt",
    "config.toml": "config.toml.txt",
    "test_project.py": "test_project.py.txt",
    "data/train.jsonl": "train.jsonl.txt",
    "data/test.jsonl": "test.jsonl.txt",
    ".gitignore": "gitignore.txt",
}
"""In the project -> in `rllm/cli/project`, where they are texts and no part of rllm: hence .txt."""

TRAIN = (
    *("rllm", "train", "agent.py:solve", "--evaluator", "evaluator.py:score", "--config", "config.toml"),
    *("--dataset", "data/train.jsonl", "--val-dataset", "data/test.jsonl"),
)


@click.command("init", epilog=example("rllm init my_agent", "rllm init . --json"))
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@json_option
@refused_options(INIT_REFUSED)
def command(directory: Path, as_json: bool) -> None:
    """Write a small project of your own that trains at once.

    DIR gets an agent, its evaluator, data, settings, and a test that passes. Training begins with random
    weights and needs no GPU. A file that is there already is never written over: then nothing is written.
    """
    existing = [name for name in FILES if (directory / name).exists()]
    if directory.is_file() or existing:
        what = (
            f"{directory} is a file" if directory.is_file() else f"{directory / existing[0]} is there already"
        )
        raise ConfigError(f"{what}; choose another directory, nothing was written.")
    for name, source in FILES.items():
        text = _text(source)
        if name == "README.md":
            text = text.replace("PROJECT", directory.resolve().name).replace("COMMAND", shlex.join(TRAIN))
        with StorageErrors(directory / name):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text, encoding="utf-8")
    if as_json:
        print_json({"project": str(directory), "files": list(FILES), "train": list(TRAIN)})
        return
    print_sentence(out(), f"{directory} has {', '.join(FILES)}.")
    print_next(
        out(),
        [
            (["cd", str(directory)], "go there"),
            (["pytest"], "see that it is sound"),
            (TRAIN, "train it"),
        ],
    )


def _text(source: str) -> str:
    return resources.files("rllm").joinpath(f"cli/project/{source}").read_text(encoding="utf-8")
