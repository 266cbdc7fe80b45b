"""The letter game on a cluster, and a process that plays it.

python letter_world.py RUN ADDRESS [SIGNAL [CHANGES]]   a driver, which gets the signal on the way
"""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import letter_game
import psutil

from rllm.models.directory import load_model
from rllm.store.episodes import EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.types.episode import Trajectory

SHORT: dict[str, Any] = {
    "steps": 2,
    "warm_start": {"steps": 4, "episodes_per_step": 8},
    "rollout": {"tasks_per_step": 3},
    "evaluation": {"every_steps": 0},
    "checkpoint": {"every_steps": 1},
}
Token = tuple[int, float, int]
LAST_WORDS = "about to be killed"
"""What a process prints that kills itself."""


class FragileEnv(letter_game.LetterEnv):
    """Kills its process in the second turn of a task, if it has a `flag`: a file that says it did. Makes no
    turn while there is a file `hold`."""

    def __init__(self, letter: str, flag: str = "", pause_s: float = 0.0, hold: str = "") -> None:
        super().__init__(letter)
        self.flag, self.pause_s, self.hold = flag, pause_s, hold

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        time.sleep(self.pause_s)
        while self.hold and Path(self.hold).exists():
            time.sleep(0.05)
        if self.flag and self.letter == "A" and self.turn == 1 and not Path(self.flag).exists():
            Path(self.flag).write_text(str(os.getpid()))
            print(LAST_WORDS, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "FragileEnv":
        return FragileEnv(
            info["letter"], info.get("flag", ""), info.get("pause_s", 0.0), info.get("hold", "")
        )


class ServerKillingEnv(letter_game.LetterEnv):
    """Kills a model server of this machine in the second turn of a task, once: `flag` is a file that says it
    did."""

    def __init__(self, letter: str, flag: str) -> None:
        super().__init__(letter)
        self.flag = Path(flag)

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        if self.letter == "A" and self.turn == 1 and not self.flag.exists():
            server = model_servers()[0]
            self.flag.write_text(str(server.pid))
            server.kill()
        return super().step(action)

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "ServerKillingEnv":
        return ServerKillingEnv(info["letter"], info["flag"])


def model_servers() -> list[psutil.Process]:
    """Those of this machine, as Ray names their processes."""
    return [
        each
        for each in psutil.process_iter(["cmdline"])
        if "ray::ModelServer" in " ".join(each.info["cmdline"] or [])
    ]


class FragilePair(letter_game.PairWorkflow):
    """Kills its process after the solvers have answered, if it has a `flag`: a file that says it did."""

    def __init__(self, *, flag: str = "", **arguments: Any) -> None:
        super().__init__(**arguments)
        self.flag = flag

    async def say(self, role: str, question: str) -> Trajectory:
        if self.flag and role == "judge" and not Path(self.flag).exists():
            Path(self.flag).write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().say(role, question)


def on_cluster(address: str, **more: Any) -> dict[str, Any]:
    return {"cluster": {"kind": "ray", "address": address, "lease_episodes": 3, "timeout_s": 900.0, **more}}


def make_trainer(run: Path, changes: dict[str, Any] | None = None, **more: Any) -> AgentTrainer:
    settings = letter_game.merged(SHORT, changes or {})
    return letter_game.make_trainer(run, settings, **{"env_class": FragileEnv, **more})


def make_pair_trainer(run: Path, changes: dict[str, Any] | None = None, **more: Any) -> AgentTrainer:
    return letter_game.make_pair_trainer(run, letter_game.merged(SHORT, changes or {}), **more)


def sampled(run: Path) -> dict[tuple[str, str, int, int], list[Token]]:
    """(phase, task, attempt, turn) to its tokens, each with log-probability and version; no episode twice."""
    tokens: dict[tuple[str, str, int, int], list[Token]] = {}
    with EpisodeStore.open(RunDirectory.read(run).store_path, read_only=True) as store:
        for phase in ("untrained", "before", "train", "after"):
            for number, episode in enumerate(store.episodes(phase)):
                steps = [step for trajectory in episode.trajectories for step in trajectory.steps]
                for turn, step in enumerate(steps):
                    key = f"{phase}/{number}", episode.task_id, episode.rollout_idx, turn
                    tokens[key] = list(
                        zip(step.response_ids, step.logprobs, step.policy_versions, strict=True)
                    )
    return tokens


def require_same_tokens(run: Path, whole: Path) -> None:
    """The same tokens of the same policy versions, with log-probabilities that agree within rounding."""
    mine, theirs = sampled(run), sampled(whole)
    assert mine.keys() == theirs.keys()
    for key, tokens in theirs.items():
        assert [each[0] for each in mine[key]] == [each[0] for each in tokens], key
        assert [each[2] for each in mine[key]] == [each[2] for each in tokens], key
        gaps = [abs(one[1] - other[1]) for one, other in zip(mine[key], tokens, strict=True)]
        assert max(gaps, default=0.0) < 1e-4, key


def require_same_learning(run: Path, whole: Path, start: Path) -> None:
    """What training changed is the same within a thousandth of its length. Single parameters are no measure:
    where a gradient is as small as Adam's epsilon, its rounding decides on much of a step."""
    mine, theirs, begin = (load_model(each / "model").model.state_dict_hf() for each in (run, whole, start))

    def distance(one: Any, other: Any) -> float:
        return math.sqrt(sum(float((one[name] - other[name]).double().square().sum()) for name in one))

    assert distance(mine, theirs) < 1e-3 * distance(theirs, begin)


def weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


class AfterFirstStep:
    """A tracker that acts in a thread of its own once the first step is on record, while the next one is
    played."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._acting = threading.Thread(target=act)

    def begin(self, phase: str) -> None:
        pass

    def advance(self, done: int, total: int) -> None:
        pass

    def log(self, step: int, phase: str, metrics: Any) -> None:
        if phase == "train" and step == 0:
            self._acting.start()

    def close(self) -> None:
        pass


class WaitsForWorkers:
    """A tracker of a run whose episodes make no turn before this many workers are ready, however long one
    needs to begin. The environment's `hold` is this one's."""

    def __init__(self, hold: Path, num_workers: int) -> None:
        self._hold, self._num_workers = hold, num_workers
        self._engine: Any = None
        self._is_over = threading.Event()

    def watch(self, engine: Any) -> None:
        self._engine = engine
        self._hold_until(self._num_workers)

    def begin(self, phase: str) -> None:
        pass

    def advance(self, done: int, total: int) -> None:
        pass

    def log(self, step: int, phase: str, metrics: Any) -> None:
        pass

    def close(self) -> None:
        self._is_over.set()

    def _hold_until(self, num_workers: int) -> None:
        self._hold.touch()

        def release() -> None:
            while len(self._engine._pool.ready) != num_workers and not self._is_over.wait(0.1):
                pass
            self._hold.unlink()

        threading.Thread(target=release, daemon=True).start()


class NodesComeAndGo(WaitsForWorkers):
    """A run that uses all the room there is: a node is lost while the second step is played, and another
    joins before the fourth. No step goes on before as many workers are ready as there are then nodes, or a
    loss is noticed."""

    def __init__(self, hold: Path, num_workers: int, lose: Callable[[], object], join: Callable[[], object]):
        super().__init__(hold, num_workers)
        self._join = join
        self._losing = threading.Thread(target=lose, daemon=True)

    def log(self, step: int, phase: str, metrics: Any) -> None:
        if phase != "train":
            return
        if step == 0:
            self._losing.start()
        if step == 1:
            self._losing.join()
            self._hold_until(self._num_workers - 1)
        if step == 2:
            self._join()
            self._hold_until(self._num_workers)


def driver(run: Path, address: str, *more: str) -> int:
    """The exit code of this file as a program, with these arguments."""
    program = Path(__file__)
    paths = [str(program.parent), str(program.parents[1] / "trainer"), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, str(program), str(run), address, *more],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        check=False,
    ).returncode


def main(run: str, address: str, fate: str = "", changes: str = "{}") -> None:
    tracker = AfterFirstStep(partial(os.kill, os.getpid(), signal.Signals[fate])) if fate else None
    settings = {"checkpoint": {"every_steps": 5}, **on_cluster(address, workers=2), **json.loads(changes)}
    make_trainer(Path(run), settings, tracker=tracker, env_args={"pause_s": 0.3}).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
