"""Model directories as an enemy would publish them: nothing of theirs runs, leads elsewhere, or takes a
machine's memory; each is refused with a sentence that names the file."""

import itertools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config

from rllm.errors import ConfigError, ModelDirectoryError
from rllm.models.builtin_templates import CHAT_TEMPLATE, IMAGE_TEMPLATE
from rllm.models.chat_template import render_template
from rllm.models.directory import load_model, save_model
from rllm.models.tokenizer import HuggingFaceTokenizer
from rllm.rendering.chat import ChatRenderer

Plant = Callable[[Path], object]
MAX_GROWTH_KB = 400_000
"""Of this process, over a directory that asks for terabytes."""
TALK = [{"role": "user", "content": "hello"}]


def edited(name: str, **changes: Any) -> Plant:
    def edit(directory: Path) -> None:
        path = directory / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def with_code(name: str, **changes: Any) -> Plant:
    """The directory's own Python, which leaves a file beside it when it runs."""

    def plant(directory: Path) -> None:
        edited(name, **changes)(directory)
        witness = directory.parent / "it-ran"
        (directory / "new_code.py").write_text(
            textwrap.dedent(f"""
            open({str(witness)!r}, "w").close()
            from transformers import PreTrainedConfig, PreTrainedTokenizerFast
            class NewConfig(PreTrainedConfig): model_type = "new"
            class NewTokenizer(PreTrainedTokenizerFast): pass
            """)
        )

    return plant


def templated(template: str) -> Plant:
    return edited("tokenizer_config.json", chat_template=template)


def in_place_of(name: str, make: Callable[[Path], object]) -> Plant:
    def plant(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        make(directory / name)

    return plant


def sparse(size: int) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(size)

    return make


def linked(target: str) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(target)


def indexed(*files: Any) -> Plant:
    named = {"weight_map": {str(number): file for number, file in enumerate(files)}}
    return in_place_of("model.safetensors.index.json", lambda path: path.write_text(json.dumps(named)))


def unix_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of one is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


NEW_CLASSES = {"AutoConfig": "new_code.NewConfig", "AutoModelForCausalLM": "new_code.NewModel"}
DIRECTORIES: dict[str, tuple[Plant, str]] = {
    "a config of its own": (
        with_code("config.json", model_type="new", auto_map=NEW_CLASSES),
        r"config\.json asks to run .* new_code\.NewConfig \(.*new_code\.py\).*--trust-remote-code",
    ),
    "a config of another repository": (
        with_code("config.json", model_type="new", auto_map={"AutoConfig": "other/repo--new_code.NewConfig"}),
        r"config\.json asks to run .*--trust-remote-code",
    ),
    "a model of its own for a known config": (
        with_code("config.json", model_type="vit", auto_map=NEW_CLASSES),
        r"config\.json asks to run .*NewModel.*--trust-remote-code",
    ),
    "a tokenizer of its own": (
        with_code(
            "tokenizer_config.json",
            tokenizer_class="NewTokenizer",
            auto_map={"AutoTokenizer": [None, "new_code.NewTokenizer"]},
        ),
        r"tokenizer_config\.json asks to run .*new_code\.NewTokenizer.*--trust-remote-code",
    ),
    "a tokenizer of its own, named as it once was": (
        with_code(
            "tokenizer_config.json", tokenizer_class="NewTokenizer", auto_map=["new_code.NewTokenizer", None]
        ),
        "tokenizer",
    ),
    "a map that is no map": (
        with_code("config.json", model_type="new", auto_map=["new_code.NewConfig"]),
        r"config\.json cannot be used",
    ),
    "a tokenizer of a terabyte": (in_place_of("tokenizer.json", sparse(1 << 40)), r"tokenizer\.json has"),
    "settings of a terabyte": (in_place_of("config.json", sparse(1 << 40)), r"config\.json has"),
    "a template of a terabyte": (in_place_of("chat_template.jinja", sparse(1 << 40)), r"template\.jinja has"),
    "a deep tokenizer": (
        in_place_of("tokenizer.json", lambda path: path.write_text("[" * 1_000_000)),
        "tokenizer",
    ),
    "deep settings": (
        in_place_of("config.json", lambda path: path.write_text('{"a":' + "[" * 1_000_000)),
        r"config\.json is not valid JSON",
    ),
    "a pipe": (in_place_of("tokenizer_config.json", os.mkfifo), r"tokenizer_config\.json is no regular file"),
    "a pipe for weights": (in_place_of("a.safetensors", os.mkfifo), r"a\.safetensors is no regular file"),
    "a socket": (in_place_of("added_tokens.json", unix_socket), r"added_tokens\.json is no regular file"),
    "a device": (in_place_of("config.json", linked("/dev/zero")), r"config\.json is a link out of"),
    "a link to a secret": (in_place_of("generation_config.json", linked("../secret")), "is a link out of"),
    "a link to a folder": (in_place_of("additional_chat_templates", linked("/etc")), "is a link out of"),
    "a link to itself": (in_place_of("merges.txt", linked("merges.txt")), r"merges\.txt cannot be read"),
    "a link to nothing": (in_place_of("vocab.json", linked("gone.json")), r"vocab\.json cannot be read"),
    "weights elsewhere": (indexed("../../secret"), r"index\.json names '\.\./\.\./secret'"),
    "weights by a whole path": (indexed("/etc/passwd"), r"index\.json names '/etc/passwd'"),
    "weights of another kind": (indexed("model.pt"), r"index\.json names 'model\.pt'"),
    "weights that are no names": (indexed(["a"], 5, None), r"index\.json names"),
    "an index that is no map": (
        in_place_of("model.safetensors.index.json", lambda path: path.write_text('{"weight_map": [[]]}')),
        r"index\.json names",
    ),
    "an end token that is none": (edited("config.json", eos_token_id="x"), "eos_token_id"),
    "end tokens in lists": (edited("config.json", eos_token_id=[[1]]), "eos_token_id"),
    "numbers without an end": (edited("config.json", rms_norm_eps=float("nan")), "above 0"),
    "rope that is none": (edited("config.json", rope_parameters="x"), "must be an object"),
    "heads that do not divide": (edited("config.json", num_key_value_heads=3), "multiple"),
    "a template that never ends": (
        templated("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"),
        "s of processor time",
    ),
    "a template that multiplies text": (templated("{{ 'x' * 99999999999 }}"), "more than 512 MiB"),
    "a template that fills lines": (templated("{{ 'x' | center(99999999999) }}"), "more than 512 MiB"),
    "a template that doubles text": (
        templated(
            "{% set n = namespace(x='x') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
        ),
        "more than 512 MiB",
    ),
    "a template that prints a book": (templated("{{ 'x' * 30000000 }}"), "printed 30,000,000 characters"),
    "a template that calls itself": (
        templated("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
        "refuses the conversation: maximum recursion",
    ),
    "a template that looks for Python": (
        templated("{{ messages.__class__.__mro__[-1].__subclasses__() }}"),
        "refuses the conversation",
    ),
    "a template that is none": (templated("{% for %}"), "refuses the conversation"),
    "a deep template": (templated("{{ " + "(" * 100_000 + ")" * 100_000 + " }}"), "chat template"),
}


@pytest.fixture(autouse=True)
def nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Today's transformers asks at the terminal; whoever answers `y` by habit would run the code."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")


def test_a_hostile_directory_runs_nothing_and_is_refused_by_file(builtin: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"eos_token_id": "hunter2"}')
    unhappy: dict[str, str] = {}
    for number, (kind, (plant, complaint)) in enumerate(DIRECTORIES.items()):
        directory = tmp_path / str(number)
        directory.mkdir()
        for file in builtin.iterdir():
            os.link(file, directory / file.name)
        for name in ("config.json", "tokenizer_config.json"):  # so that edits stay in the copy
            text = (directory / name).read_text()
            (directory / name).unlink()
            (directory / name).write_text(text)
        plant(directory)
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            ChatRenderer(load_model(directory).tokenizer)
            unhappy[kind] = "accepted"
        except ConfigError as error:
            said = str(error)
            is_told = pytest.raises(ConfigError, match=complaint).matches(error)  # pyright: ignore
            if not is_told or "hunter2" in said or (tmp_path / "it-ran").exists():
                unhappy[kind] = said
        grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
        if grown_kb > MAX_GROWTH_KB:
            unhappy[kind] = f"grew by {grown_kb:,} kB"
    assert not unhappy


WRONG = (-1, 0, 3, 10**9, 10**15, 10**30, "x", [1], {}, 1.5, True, float("inf"))
NUMBERS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_numbers_of_another_model_are_refused_before_memory_is_taken(
    family: str, builtin: Path, saved: Callable[[GPT2Config], tuple[Path, Any]], copied: Path
) -> None:
    names: tuple[str, ...] = (*NUMBERS, "num_key_value_heads", "head_dim", "max_position_embeddings")
    if family == "gpt2":
        source, _ = saved(
            GPT2Config(
                vocab_size=640, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=2, eos_token_id=2
            )
        )
        names = ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions", "n_inner")
        for name in ("config.json", "model.safetensors"):
            (copied / name).write_bytes((source / name).read_bytes())
    config = json.loads((copied / "config.json").read_text())
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in names:
        for value in WRONG:
            (copied / "config.json").write_text(json.dumps({**config, name: value}))
            if _is_loaded(copied):  # what weights do not depend on may be another number
                assert type(value) is int, (name, value)
                assert name in ("num_attention_heads", "max_position_embeddings", "n_head"), (name, value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < MAX_GROWTH_KB


def _is_loaded(directory: Path) -> bool:
    try:
        load_model(directory)
    except ModelDirectoryError as error:
        return str(directory) not in str(error)
    return True


def test_tensors_of_impossible_shapes_are_refused(copied: Path) -> None:
    weights = load_file(copied / "model.safetensors")
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        for tensor in (torch.zeros(0), torch.zeros(()), torch.zeros(1, 1, 1), weights[name].unsqueeze(0)):
            save_file({**weights, name: tensor.contiguous()}, copied / "model.safetensors")
            with pytest.raises(ModelDirectoryError, match=name):
                load_model(copied)


def test_code_runs_for_who_asks_for_it_and_goes_with_the_model(copied: Path, tmp_path: Path) -> None:
    with_code(
        "tokenizer_config.json",
        tokenizer_class="NewTokenizer",
        auto_map={"AutoTokenizer": [None, "new_code.NewTokenizer"]},
    )(copied)
    loaded = load_model(copied, trust_remote_code=True)
    assert (tmp_path / "it-ran").exists()
    save_model(loaded, tmp_path / "saved")
    assert (tmp_path / "saved" / "new_code.py").is_file()
    with pytest.raises(ModelDirectoryError, match="--trust-remote-code"):
        load_model(tmp_path / "saved")


def test_a_known_model_that_brings_code_along_is_loaded_without_it(copied: Path, tmp_path: Path) -> None:
    with_code("config.json", auto_map=NEW_CLASSES)(copied)
    load_model(copied)
    assert not (tmp_path / "it-ran").exists()


def test_a_snapshot_of_the_hub_is_links_into_its_own_blobs(builtin: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b/snapshots/0f3", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(builtin.iterdir()):
        (blobs / str(number)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    load_model(snapshot)
    (tmp_path / "by-another-name").symlink_to(snapshot)
    load_model(tmp_path / "by-another-name")


# ---- the process that renders ------------------------------------------------------------------------------


def test_a_template_that_was_ended_takes_nobody_with_it(copied: Path) -> None:
    templated(
        "{% if messages[0].content == 'loop' %}"
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
        "{% else %}{{ messages[0].content }}{% endif %}"
    )(copied)
    tokenizer = HuggingFaceTokenizer(copied)
    answers: dict[str, str] = {}

    def ask(content: str) -> None:
        try:
            answers[content] = tokenizer.apply_template(
                [{"role": "user", "content": content}], add_generation_prompt=True
            )
        except ConfigError as error:
            answers[content] = str(error)

    asking = [threading.Thread(target=ask, args=(content,)) for content in ("one", "loop", "two", "three")]
    for each in asking:
        each.start()
    for each in asking:
        each.join()
    assert "processor time" in answers.pop("loop")
    assert answers == {name: name for name in ("one", "two", "three")}


def test_templates_are_rendered_on_after_a_signal_to_all_and_a_kill() -> None:
    template = CHAT_TEMPLATE + "{# #}"  # no built-in one, which would be rendered here
    variables = {"messages": TALK, "tools": None, "add_generation_prompt": True}
    expected = render_template(template, variables)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL):
        (child,) = _rendering_children(os.getpid())
        os.kill(child, number)
        if number == signal.SIGKILL:
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert render_template(template, variables) == expected


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, IMAGE_TEMPLATE])
def test_the_templates_of_built_in_models_print_here_what_the_process_prints(template: str) -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "What is it? "}]
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "ä\ud800<"}}}
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": {}}}}}]
    talks: list[dict[str, Any]] = [
        {"messages": TALK},
        {"messages": [*TALK, {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": tools},
        {"messages": [{"role": "user", "content": parts if template == IMAGE_TEMPLATE else "\n x "}]},
        {"messages": [{"role": "user", "content": object()}]},
    ]
    for asks, talk in itertools.product((True, False), talks):
        variables = {"tools": None, **talk, "add_generation_prompt": asks}
        assert render_template(template, variables) == render_template(template + "{# #}", variables)
    for refused in ({"messages": [{"role": "user", "content": 1}]}, {"messages": 1}):
        complaints: list[str] = []
        for each in (template, template + "{# #}"):
            with pytest.raises(ConfigError) as caught:
                render_template(each, refused)
            complaints.append(str(caught.value))
        assert complaints[0] == complaints[1]


def test_the_process_sees_no_keys_and_ends_with_a_program_that_is_killed(tmp_path: Path) -> None:
    program = """
        from rllm.models.chat_template import render_template
        render_template("{{ messages }}", {"messages": []})
        print("ready", flush=True)
        input()
        """
    environment = {**os.environ, "OPENAI_API_KEY": "sk-secret", "HF_TOKEN": "hf-secret"}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        cwd=tmp_path,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"ready\n"
        (child,) = _rendering_children(running.pid)
        assert b"secret" not in Path(f"/proc/{child}/environ").read_bytes()
        ends = os.pidfd_open(child)
        running.kill()
        _wait_for_end(ends)


def _wait_for_end(pidfd: int) -> None:
    import select

    readable, _, _ = select.select([pidfd], [], [], 30)
    os.close(pidfd)
    assert readable


def _rendering_children(pid: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            children += [int(each) for each in (task / "children").read_text().split()]
    return [each for each in children if b"template_process.py" in Path(f"/proc/{each}/cmdline").read_bytes()]
