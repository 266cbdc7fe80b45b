"""`rllm eval NAME`: rules for models from elsewhere, and what training showed for those trained here.

prompt alone ──► a scripted player ──► the optimum        a run ──► the same prompts and figures as its own
"""

import json
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rllm.cli.main import rllm as front_door
from rllm.environments.frozenlake import FrozenLakeEnv
from rllm.environments.games.env import GameEnv
from rllm.environments.worlds import world_named
from rllm.models.builtin import create_model
from rllm.models.facts import FROM_SCRATCH
from rllm.store.episodes import EpisodeStore

Rllm = Callable[..., Result]
Messages = list[dict[str, Any]]
SMALL = (
    *("warm_start.steps=1", "warm_start.episodes_per_step=4", "steps=1", "rollout.tasks_per_step=2"),
    *("rollout.group_size=2", "rollout.max_turns=6", "threads=1"),
    *("evaluation.num_tasks=4", "evaluation.every_steps=0", "task.num_train_tasks=100"),
)


class Endpoint:
    """An OpenAI-style server whose model answers by the conversation that it is sent, and nothing else."""

    def __init__(self) -> None:
        self.answer: Callable[[Messages], str] = lambda messages: ""
        self.bodies: list[dict[str, Any]] = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                is_trial = "say hi" in str(body["messages"][-1]["content"]).lower()
                if not is_trial:
                    endpoint.bodies.append(body)
                text = "hi" if is_trial else endpoint.answer(body["messages"])
                choice = {"index": 0, "message": {"role": "assistant", "content": text}}
                usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
                reply = {"id": "c", "object": "chat.completion", "model": "m", "usage": usage}
                payload = json.dumps(reply | {"choices": [choice | {"finish_reason": "stop"}]}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing: tests read stderr."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint()
    threading.Thread(target=made.server.serve_forever, daemon=True).start()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture(scope="module")
def dark_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole small run of the dark maze."""
    path = tmp_path_factory.mktemp("dark") / "run"
    words = [word for assignment in SMALL for word in ("--set", assignment)]
    done = CliRunner().invoke(front_door, ["train", "dark-maze", *words, "--output", str(path), "--json"])
    assert done.exit_code == 0, done.stderr
    return path


def measured(rllm: Rllm, endpoint: Endpoint, name: str, *words: str) -> dict[str, Any]:
    done = rllm("eval", name, "--base-url", endpoint.url, "--model", "m", "--output",
                f"e{len(endpoint.bodies)}", "--max-examples", "6", *words, "--json")  # fmt: skip
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


# ---- players that know nothing but what they are sent ----------------------------------------------------


def last(messages: Messages) -> str:
    return messages[-1]["content"]


def hand_on_the_wall(messages: Messages) -> str:
    """Dark maze: left of where one came from, else straight on, right, back."""
    around = ("Up", "Left", "Down", "Right")
    moves = [re.findall(r"<answer>(\w+)</answer>", each["content"]) for each in messages
             if each["role"] == "assistant"]  # fmt: skip
    heading = around.index(moves[-1][0]) if moves else 0
    ways = re.findall(r"\b(?:Up|Down|Left|Right)\b", last(messages).splitlines()[-1])
    return next(around[(heading + turn) % 4] for turn in (1, 0, 3, 2) if around[(heading + turn) % 4] in ways)


def shortest_way(messages: Messages) -> str:
    """Frozen lake: the first move of a shortest way over F from P to G."""
    rows = [line for line in last(messages).splitlines() if re.fullmatch("[PFHG]+", line)]
    cells = {(y, x): cell for y, row in enumerate(rows) for x, cell in enumerate(row)}
    steps = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
    queue = deque([(next(place for place in cells if cells[place] == "P"), "")])
    reached = {queue[0][0]}
    while queue:
        (y, x), first = queue.popleft()
        for move, (down, right) in steps.items():
            place = (y + down, x + right)
            if cells.get(place, "H") == "H" or place in reached:
                continue
            if cells[place] == "G":
                return first or move
            reached.add(place)
            queue.append((place, first or move))
    return "Up"


def worked_out(messages: Messages) -> str:
    """Arithmetic, and a calculator that nobody has to use."""
    first, sign, second = re.findall(r"(\d+) ([-+]) (\d+)", last(messages))[-1]
    return str(int(first) + int(second) * (1 if sign == "+" else -1))


def expression(messages: Messages) -> str:
    """Countdown of two numbers."""
    *numbers, target = map(int, re.findall(r"\d+", last(messages)))
    ways = (f"{a}{sign}{b}" for a, b in permutations(numbers) for sign in "+-")
    return next(way for way in ways if eval(way) == target)


SIGNS = {"add": "+", "take": "-", "times": "*", "mod": "%"}


def function(messages: Messages) -> str:
    """Small programs, and those that hide a step: it is what f(0) shall be."""
    recipe = next(each["content"] for each in messages if each["role"] == "user")
    parts = re.findall(r"(add|take|times|mod) (\d+)", recipe.splitlines()[-1])
    shown = re.search(r"Expected: (-?\d+)", last(messages))
    hidden = [("add", shown[1])] if shown else []
    lines = [f"    x {SIGNS[word]}= {number}" for word, number in [*parts, *hidden]]
    return "\n".join(["def f(x):", *lines, "    return x"])


def mended_line(messages: Messages) -> str:
    """A file with a bug: what the comment says, in the line that the issue names."""
    file = next(each["content"] for each in messages if each["role"] == "user")
    if last(messages) != file:
        return "submit"
    number = re.findall(r"line (\d+): f\(", file)[-1]
    word, operand = re.findall(rf"^{number} .*# (\w+) (\d+)$", file, re.MULTILINE)[-1]
    return f"set {number} x {SIGNS[word]}= {operand}"


PLAYERS = {
    "arithmetic": worked_out,
    "calculator": worked_out,
    "countdown": expression,
    "dark-maze": hand_on_the_wall,
    "frozenlake": shortest_way,
    "program-repair": function,
    "small-programs": function,
    "swe-small": mended_line,
}


@pytest.mark.parametrize("name", PLAYERS)
def test_who_reads_the_prompt_alone_comes_to_the_optimum(
    rllm: Rllm, endpoint: Endpoint, name: str, request: pytest.FixtureRequest
) -> None:
    if name in ("program-repair", "small-programs", "swe-small"):
        request.getfixturevalue("bubblewrap")
    is_code = PLAYERS[name] is function
    form = "So be it.\n```python\n{}\n```" if is_code else "So be it.\n<answer>{}</answer>"
    endpoint.answer = lambda messages: form.format(PLAYERS[name](messages))
    report = measured(rllm, endpoint, name)
    assert report["sampled"]["successes"] == 6, report["sampled"]
    assert report["stamp"]["settings"]["of"] == "benchmark"
    prompt = "\n".join(each["content"] for each in endpoint.bodies[0]["messages"])
    assert ("```python" if is_code else "<answer>") in prompt


# ---- rules or none ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dark-maze", "lights-out"])
def test_a_model_from_elsewhere_is_told_the_rules_unless_somebody_says_otherwise(
    rllm: Rllm, endpoint: Endpoint, name: str
) -> None:
    told = measured(rllm, endpoint, name, "--concurrency", "1")["stamp"]
    with_rules = endpoint.bodies[0]["messages"]
    endpoint.bodies.clear()
    words = ("--as-trained", "--output", "as-trained", "--concurrency", "1")
    untold = measured(rllm, endpoint, name, *words)["stamp"]
    bare = endpoint.bodies[0]["messages"]
    game = world_named(name).env_class
    assert issubclass(game, GameEnv)
    env = game.from_dict({"split": "test", "index": 0, **told["settings"]["environment_args"]})
    assert isinstance(env, GameEnv)
    assert env.game.rules in last(with_rules)
    assert last(bare) == env.game.board()
    assert len(bare) == 1
    assert (told["settings"]["of"], untold["settings"]["of"]) == ("benchmark", "training")
    assert untold["settings"]["environment_args"]["show_rules"] is False
    assert untold["settings"]["agent_args"] == {"instructions": False}
    compared = json.loads(rllm("eval", "--compare", "e0", "as-trained", "--json").stdout)
    assert compared["comparisons"]["sampled"]["tasks"] == 6
    assert compared["differing"]["shown as by"] == ["benchmark", "training"]
    assert compared["differing"]["sampled.max_tokens"] == [1024, 3]
    assert "seed" not in compared["differing"]
    shown = rllm("eval", "--compare", "e0", "as-trained").stdout
    assert ": max_turns" in shown
    assert "differ in more" not in rllm("eval", "--compare", "e0", "e0").stdout


def test_a_run_is_measured_again_with_the_prompts_and_the_figures_of_its_own_report(
    rllm: Rllm, dark_run: Path
) -> None:
    of_run, of_model = (
        json.loads(rllm("eval", "dark-maze", "--model", model, "--output", name, "--max-examples", "4",
                        "--threads", "1", "--json").stdout)
        for name, model in (("run", dark_run), ("model", dark_run / "model"))
    )  # fmt: skip
    assert of_run["stamp"] == of_model["stamp"]
    assert of_run["stamp"]["settings"]["of"] == "training"
    with (
        EpisodeStore.open(dark_run / "store.sqlite", read_only=True) as own,
        EpisodeStore.open(Path("run/store.sqlite"), read_only=True) as again,
    ):
        theirs, ours = (
            {each.task_id: tokens_of(each) for each in store.episodes(phase)}
            for store, phase in ((own, "after.greedy"), (again, "greedy"))
        )
    assert theirs == ours
    assert len(ours) == 4


def tokens_of(episode: Any) -> list[tuple[list[int], list[int]]]:
    return [(step.prompt_ids, step.response_ids) for each in episode.trajectories for step in each.steps]


def test_a_built_in_model_is_shown_what_training_shows_and_rules_if_asked(rllm: Rllm) -> None:
    words = (
        "eval",
        "dark-maze",
        "--model",
        "builtin:tiny",
        "--max-examples",
        "2",
        "--threads",
        "1",
        "--json",
    )
    plain = json.loads(rllm(*words).stdout)
    told = json.loads(rllm(*words, "--with-rules", "--sampling", "max_tokens=4").stdout)
    assert (plain["stamp"]["settings"]["of"], told["stamp"]["settings"]["of"]) == ("training", "benchmark")
    assert told["sampled"]["tokens"]["prompt"] > 3 * plain["sampled"]["tokens"]["prompt"]
    assert plain["output"] != told["output"]


def test_a_model_directory_from_elsewhere_is_told_the_rules_and_may_think(
    rllm: Rllm, from_elsewhere: Path
) -> None:
    done = rllm("eval", "dark-maze", "--model", "elsewhere", "--max-examples", "1", "--threads", "1",
                "--output", "e", "--sampling", "temperature=1", "--json")  # fmt: skip
    report = json.loads(done.stdout)
    assert report["stamp"]["settings"]["of"] == "benchmark"
    assert report["stamp"]["ways"]["sampled"]["max_tokens"] > 1000


def test_a_run_plays_the_tasks_of_the_benchmark_that_is_named(rllm: Rllm, finished_run: Any) -> None:
    done = rllm("eval", "frozenlake-slippery", "--model", finished_run.path, "--max-examples", "1",
                "--threads", "1", "--output", "e", "--json")  # fmt: skip
    stamp = json.loads(done.stdout)["stamp"]
    settings = stamp["settings"]
    assert stamp["max_turns"] >= settings["environment_args"]["max_steps"] == 50
    assert settings["environment_args"]["is_slippery"] is True
    assert settings["agent_args"]["view"] == 4
    with EpisodeStore.open(Path("e/store.sqlite"), read_only=True) as store:
        envs = [FrozenLakeEnv.from_dict(dict(each.task)) for each in store.episodes("greedy")]
    assert [each.is_slippery for each in envs] == [True]


# ---- training and distilling a model from elsewhere --------------------------------------------------------


@pytest.fixture
def from_elsewhere() -> Path:
    """A model whose chat template is not ours, and that does not say that it was made here."""
    create_model(Path("elsewhere"), "tiny-8k")
    config = json.loads(Path("elsewhere/config.json").read_text())
    del config[FROM_SCRATCH]
    Path("elsewhere/config.json").write_text(json.dumps(config))
    settings = Path("elsewhere/tokenizer_config.json")
    chat = json.loads(settings.read_text())
    settings.write_text(json.dumps(chat | {"chat_template": chat["chat_template"] + " "}))
    return Path("elsewhere")


@pytest.mark.parametrize("verb", ["train", "distill"])
def test_training_a_model_from_elsewhere_shows_it_the_rules_unless_the_recipe_is_from_scratch(
    rllm: Rllm, from_elsewhere: Path, verb: str
) -> None:
    words = [verb, "dark-maze", "--model", from_elsewhere, "--dry-run", "--json"]
    words += ["--teacher", from_elsewhere] if verb == "distill" else []
    plain, from_scratch = rllm(*words), rllm(*words, "--recipe", "scratch")
    assert not plain.stderr
    full, bare = (json.loads(each.stdout)["config"] for each in (plain, from_scratch))
    assert bare["task"]["environment_args"]["show_rules"] is False
    assert bare["rollout"]["max_tokens_per_turn"] == 3
    assert "show_rules" not in full["task"]["environment_args"]
    assert full["task"]["agent_args"] == {}
    assert full["rollout"]["max_tokens_per_turn"] == 256
    assert full["warm_start"]["steps"] == 0
    assert full["rollout"]["max_turns"] == bare["rollout"]["max_turns"]
    if verb == "train":
        assert full["optimizer"]["name"] == "adamw"
        assert full["optimizer"]["learning_rate"] < 1e-3


def test_a_run_that_was_told_the_rules_is_measured_with_them(rllm: Rllm, from_elsewhere: Path) -> None:
    quick = ("steps=0", "warm_start.steps=0", "evaluation.num_tasks=1", "rollout.max_tokens_per_turn=4")
    sizes = (
        "task.environment_args.max_steps=19",
        "task.num_train_tasks=9",
        "rollout.max_turns=2",
        "inference.max_context=1024",
        "threads=1",
    )
    words = [word for assignment in (*quick, *sizes) for word in ("--set", assignment)]
    trained = rllm("train", "frozenlake", "--model", from_elsewhere, *words, "--output", "r", "--json")
    assert trained.exit_code == 0, trained.stderr
    report = rllm("eval", "frozenlake", "--model", "r", "--max-examples", "1", "--threads", "1", "--json")
    settings = json.loads(report.stdout)["stamp"]["settings"]
    assert "You have 19 moves." in settings["agent_args"]["system_prompt"]
    again = rllm("train", "frozenlake", "--model", "r", *words, "--output", "r2", "--dry-run", "--json")
    agent_args = json.loads(again.stdout)["config"]["task"]["agent_args"]
    assert "You have 19 moves." in agent_args["system_prompt"]


@pytest.mark.parametrize("content", ["{", "[]", b"\xff"])
def test_a_model_with_a_broken_tokenizer_is_refused_in_a_sentence(
    rllm: Rllm, from_elsewhere: Path, content: str | bytes
) -> None:
    settings = from_elsewhere / "tokenizer_config.json"
    settings.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused = rllm("eval", "dark-maze", "--model", from_elsewhere, "--max-examples", "1")
    assert refused.exit_code == 2
    assert "elsewhere" in refused.stderr


@pytest.mark.parametrize("model", ["run", "builtin"])
def test_a_model_that_was_made_here_is_not_said_to_lack_rules(rllm: Rllm, dark_run: Path, model: str) -> None:
    place = dark_run if model == "run" else "builtin:tiny"
    assert not rllm("train", "dark-maze", "--model", place, "--dry-run").stderr
    assert not rllm("distill", "dark-maze", "--model", place, "--teacher", dark_run, "--dry-run").stderr


@pytest.mark.parametrize(
    "words", [("gsm8k",), ("flow.py:solve", "--evaluator", "exact", "--dataset", "rows.jsonl")]
)
def test_rules_are_asked_for_by_the_recipe(rllm: Rllm, words: tuple[str, ...]) -> None:
    Path("rows.jsonl").write_text(json.dumps({"question": "1 + 1 = ?", "answer": "2"}) + "\n")
    Path("flow.py").write_text("def solve(task, config):\n    return '2'\n")
    refused = rllm("train", *words, "--with-rules", "--dry-run")
    assert refused.exit_code == 2
    assert "--recipe pretrained" in refused.stderr


def test_the_report_of_an_agent_of_ones_own_claims_nothing_of_rules(rllm: Rllm, endpoint: Endpoint) -> None:
    Path("own.py").write_text(
        "from rllm.agents.game import GameAgent\n\n\nclass Mine(GameAgent):\n    pass\n"
    )
    done = rllm("eval", "dark-maze", "--base-url", endpoint.url, "--model", "m", "--max-examples", "1",
                "--agent", "own.py:Mine")  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert "own.py:Mine" in done.stdout
    assert "Shown with rules" not in done.stdout


@pytest.mark.parametrize(
    "words", [("sums",), ("flow.py:solve", "--evaluator", "exact", "--dataset", "rows.jsonl")]
)
def test_where_there_is_nothing_to_choose_the_choice_is_refused(
    rllm: Rllm, endpoint: Endpoint, words: tuple[str, ...]
) -> None:
    Path("rows.jsonl").write_text(json.dumps({"question": "1 + 1 = ?", "answer": "2"}) + "\n")
    Path("flow.py").write_text("def solve(task, config):\n    return '2'\n")
    assert rllm("dataset", "register", "sums", "rows.jsonl", "--evaluator", "math").exit_code == 0
    refused = rllm("eval", *words, "--base-url", endpoint.url, "--model", "m", "--with-rules")
    assert refused.exit_code == 2
    assert "--with-rules" in refused.stderr
    assert not endpoint.bodies
