"""Runs of three steps, with gradient, that are killed at every line they log and once at every place in the
code that changes a file: what they leave equals, to the last bit, what an undisturbed run leaves.

Each process of a chain dies at the first place that none before it died at, so that the places where a
resumed run alone comes by are among them. Who plays: the games beside this file; who kills: killing.py.
"""

import errno
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from rllm.files.atomic import MANIFEST, verify_manifest
from rllm.store.episodes import EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.tracking.jsonl import read_metrics

Ask = Callable[..., dict[str, Any]]

TRAINED: dict[str, Any] = {
    "steps": 3,
    "warm_start": {"steps": 5, "episodes_per_step": 16},
    "rollout": {"max_tokens_per_turn": 20},
    "checkpoint": {"every_steps": 1},
}
"""A model that learned something before: an untrained one writes until it is cut off, and has no gradient."""
CRITIC: dict[str, Any] = {
    "algorithm": {"estimator": "gae", "kl_coef": 0.05, "kl_target": 0.01},
    "critic": {"trunk": "separate"},
}
BACKGROUND: dict[str, Any] = {"checkpoint": {"every_steps": 1, "background": True}}
TWO: dict[str, Any] = {**TRAINED, "warm_start": {"steps": 2}}
ROWS: dict[str, Any] = {"epochs": 1, "checkpoint": {"every_steps": 1}}
GAMES: dict[str, dict[str, Any]] = {
    "train": {"game": "letters", "changes": TRAINED},
    "critic": {"game": "letters", "changes": TRAINED | CRITIC},
    "in the background": {"game": "letters", "changes": TRAINED | BACKGROUND},
    "lora": {"game": "letters", "changes": TRAINED | {"lora": {"rank": 4, "alpha": 16.0}}},
    "lora in 4 bits": {
        "game": "letters",
        "changes": TRAINED | {"lora": {"rank": 64, "base_dtype": "nf4"}, "optimizer": {"name": "adamw8bit"}},
    },
    "policies": {"game": "pair", "changes": TWO},
    "policies in lockstep": {"game": "pair", "changes": TWO | {"inference": {"lockstep": True}}},
    "distill": {"game": "taught", "changes": {"steps": 3, "checkpoint": {"every_steps": 1}}},
    "sft": {"game": "chats", "changes": ROWS},
    "dpo": {"game": "preferences", "changes": {**ROWS, "batch_size": 3}},
}
UNIQUE = ("uid", "id", "started_at")
"""Names that are never given twice, and times."""
WITHOUT_LOCKSTEP = (
    *("logprobs", "canary_moved", "canary_gap", "logprob_gap_sampler", "sampler_kl", "cached_tokens"),
    "rollout_bytes",
)
"""What the sampler said of tokens: without lockstep its last bit depends on who was sampled beside, and what
it reads anew on who came before, as does the number of its steps."""


def result_of(run: Path) -> Any:
    """Everything in the directory of a finished run, but for seconds."""
    directory = RunDirectory.read(run)
    lockstep = directory.config().get("inference", {}).get("lockstep", True)
    unrepeatable = UNIQUE if lockstep else UNIQUE + WITHOUT_LOCKSTEP
    checkpoints: dict[str, Any] = {}
    for path in sorted(directory.checkpoints_path.iterdir()):
        verify_manifest(path)
        files = json.loads((path / MANIFEST).read_text())["files"]
        del files["state.json"]  # which has seconds in it
        checkpoints[path.name] = files, json.loads((path / "state.json").read_text())
    result = {
        "config": directory.config(),
        "metrics": read_metrics(directory.metrics_path),
        "summary": directory.summary(),
        "checkpoints": checkpoints,
        "weights": {
            str(path.relative_to(run)): path.read_bytes()
            for path in sorted(run.rglob("*.safetensors"))
            if "checkpoints" not in path.parts
        },
        "files": sorted(str(path.relative_to(run)) for path in run.rglob("*")),
        "episodes": list(_episodes(directory)),
    }
    return _without(result, unrepeatable)


def _episodes(directory: RunDirectory) -> Iterator[dict[str, Any]]:
    if directory.store_path.exists():
        with EpisodeStore.open(directory.store_path, read_only=True) as store:
            for episode in store.episodes():
                yield {"episode": episode.id, **episode.to_dict()}


def _without(value: Any, unrepeatable: tuple[str, ...]) -> Any:
    """`value` without seconds, shares of what a machine can do, and what else cannot be repeated, on every
    level of it."""
    if isinstance(value, dict):
        return {
            name: _without(each, unrepeatable)
            for name, each in value.items()
            if not str(name).endswith(("_s", "_share", "machines"))
            and str(name).rpartition(".")[2] not in unrepeatable
        }
    if isinstance(value, list | tuple):
        return [_without(each, unrepeatable) for each in value]
    return value


@pytest.fixture(scope="module")
def killed_places() -> list[str]:
    """Places that any chain has died at, lines of the run apart."""
    return []


@pytest.mark.slow
@pytest.mark.parametrize("name", GAMES)
def test_killed_at_every_boundary_and_every_place_it_leaves_what_an_undisturbed_run_leaves(
    name: str, ask: Ask, killed_places: list[str], tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert ask(whole, **GAMES[name])["signal"] == 0
    expected = result_of(whole)
    trained = [line for line in expected["metrics"] if line["phase"] == "train"]
    norms = [line[name] for line in trained for name in line if name.rpartition(".")[2] == "grad_norm"]
    assert len(trained) == 3
    assert len(norms) >= 3
    assert min(norms) > 0.05, "a step without gradient proves nothing"
    lines: list[str] = []
    while (ended := ask(killed, **GAMES[name], die_at_new_place=killed_places + lines))["signal"] == 9:
        place = ended["place"]
        (lines if place.startswith("line ") else killed_places).append(place)
        assert len(killed_places) + len(lines) < 200, "it dies for ever"
    print(f"{name}: {len(lines)} lines; {len(killed_places)} places so far")
    assert len(lines) == len(expected["metrics"])
    assert result_of(killed) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", "in the background", "lora", "sft"])
def test_a_disk_that_refuses_writes_ends_a_run_with_one_message_and_it_goes_on_once_there_is_room(
    name: str, ask: Ask, tmp_path: Path
) -> None:
    """From the first change of a file at each place on, full and read-only in turn."""
    whole, refused = tmp_path / "whole", tmp_path / "refused"
    assert ask(whole, **GAMES[name])["signal"] == 0
    places: list[str] = []
    numbers = itertools.cycle((errno.ENOSPC, errno.EROFS))
    while "error" in (ended := ask(refused, **GAMES[name], refuse_at_new_place=places, errno=next(numbers))):
        assert ended["error"] == "StorageError", ended
        assert "not be written" in ended["message"]
        places.append(ended["place"])
        assert len(places) < 100, "it is refused for ever"
    assert len(places) > 20
    assert result_of(refused) == result_of(whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", "policies in lockstep", "sft"])
def test_neither_the_hash_seed_nor_the_working_directory_leaves_a_trace(
    name: str, ask_elsewhere: Callable[..., AbstractContextManager[Ask]], tmp_path: Path
) -> None:
    results: list[Any] = []
    for seed in ("0", "1"):
        place = tmp_path / f"place {seed}"
        place.mkdir()
        with ask_elsewhere(place, PYTHONHASHSEED=seed) as ask_there:
            assert ask_there(place / "run", **GAMES[name])["signal"] == 0
        results.append(result_of(place / "run"))
    assert results[0] == results[1]
