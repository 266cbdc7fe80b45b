"""Picking and paying."""

from evaluator import solver_judge_evaluator
from solver_judge_flow import pick

from rllm.types import Episode, Step, Trajectory


def test_the_judge_picks_by_number():
    assert pick("I say <select> 2 </select>", ["a", "b"]) == "b"
    assert pick("<select>3</select>", ["a", "b"]) == ""
    assert pick("nothing", ["a", "b"]) == ""


def test_every_trajectory_is_paid_for_itself():
    answers = ["<answer>2 + 3</answer>", "<answer>2 * 3</answer>", "<answer>2 + 3</answer>"]
    trajectories = [
        Trajectory(name=name, steps=[Step(action=answer)])
        for name, answer in zip(["solver", "solver", "judge"], answers, strict=True)
    ]
    episode = Episode(trajectories=trajectories)
    output = solver_judge_evaluator.evaluate({"nums": [2, 3], "target": 5}, episode)
    assert output.is_correct
    assert [each.reward == 1.0 for each in trajectories] == [True, False, True]
    assert {each.name: each.value for each in output.signals}["judge_acc"] == 1.0
