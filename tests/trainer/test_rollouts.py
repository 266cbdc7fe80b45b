from rllm.trainer.rollouts import Rollouts, step_of
from rllm.types.episode import Episode, Step, Trajectory


def test_turns_whose_tool_calls_could_not_be_read_are_counted() -> None:
    steps = [Step(info={"unparsed_markup": True}), Step(), Step(info={"unparsed_markup": True})]
    episodes = [
        Episode(trajectories=[Trajectory(steps=steps[:2])]),
        Episode(trajectories=[Trajectory(steps=steps[2:])]),
    ]
    assert Rollouts(episodes=episodes).metrics()["unparsed_tool_markup"] == 2
    assert Rollouts().metrics()["unparsed_tool_markup"] == 0


def test_episodes_say_which_step_they_are_for() -> None:
    purposes = ("train/7", "train/7/greedy", "validation", "report/before", "train", "")
    assert [step_of(each) for each in purposes] == [7, 7, -1, -1, -1, -1]


def test_the_share_of_grading_is_of_all_that_episodes_took() -> None:
    timings: list[dict[str, float]] = [
        {"model_s": 2.0, "queue_s": 1.5, "env_s": 1.0, "grader_s": 0.5},
        {"model_s": 1.0, "grader_s": 1.0},  # a program's evaluator stands beside no environment
    ]
    episode = Episode(trajectories=[Trajectory(steps=[Step(timings=each) for each in timings])])
    assert Rollouts(episodes=[episode]).grading_share() == 1.5 / 5.0
    assert Rollouts().grading_share() == 0.0
