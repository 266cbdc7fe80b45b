"""The agent of games: rules once, a board a turn, and the one move that an answer ends with."""

import re
from pathlib import Path

import pytest

from rllm.agents.checks import check_agent
from rllm.agents.game import GameAgent, parse_move, system_prompt
from rllm.agents.named import agent_named
from rllm.environments.games.hanoi import HanoiEnv

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "games.md"


def test_the_move_is_what_the_answer_ends_with(subtests: pytest.Subtests) -> None:
    for answer, move in [
        ("Up", "Up"),
        (" 2 3\n", "2 3"),
        ("<answer>Up</answer>", "Up"),
        ("I go up, so <answer> 2 3 </answer>", "2 3"),
        ("<think>Up? Down?</think>Left", "Left"),
        ("<answer>Up</answer> no, <answer>Down</answer>", "Down"),
        ("<answer>Up</answer> or maybe Down", ""),
        ("<answer>Up", ""),
        ("<think>Up", ""),
        ("", ""),
        ("Up or Down", "Up or Down"),
        ("I go Up", "I go Up"),
    ]:
        with subtests.test(answer=answer, move=move):
            assert parse_move(answer).action == move


def test_the_contract_of_agents_holds() -> None:
    check_agent(GameAgent(), observation="board", answer="Up")
    check_agent(GameAgent(instructions=False), observation="board", answer="<answer>Up</answer>")
    assert agent_named("game") is GameAgent


def test_a_game_is_played_to_its_end() -> None:
    env = HanoiEnv({"disks": "AA", "goal": "CC"})
    agent = GameAgent()
    agent.reset()
    observation, info = env.reset()
    agent.update_from_env(observation, 0.0, False, info)
    for answer in ("A B", "Then <answer>A C</answer>", "sorry", "b c"):
        action = agent.update_from_model(answer)
        observation, reward, done, info = env.step(action)
        agent.update_from_env(observation, reward, done, info)
    steps = agent.trajectory.steps
    assert [step.reward for step in steps] == [0.0, 0.0, 0.0, 1.0]
    assert [step.info["valid"] for step in steps] == [True, True, False, True]
    assert steps[-1].done
    messages = agent.chat_completions
    assert messages[0] == {"role": "system", "content": system_prompt()}
    rules = [message for message in messages if "Tower of Hanoi" in str(message.get("content"))]
    assert len(rules) == 1
    assert [message["role"] for message in messages[1:]] == ["user", "assistant"] * 4


def test_what_the_document_shows_runs() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(program, str(DOCUMENT), "exec"), {})
