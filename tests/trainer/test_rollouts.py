from rllm.trainer.rollouts import Rollouts
from rllm.types.episode import Episode, Step, Trajectory


def test_turns_whose_tool_calls_could_not_be_read_are_counted() -> None:
    steps = [Step(info={"unparsed_markup": True}), Step(), Step(info={"unparsed_markup": True})]
    episodes = [
        Episode(trajectories=[Trajectory(steps=steps[:2])]),
        Episode(trajectories=[Trajectory(steps=steps[2:])]),
    ]
    assert Rollouts(episodes=episodes).metrics()["unparsed_tool_markup"] == 2
    assert Rollouts().metrics()["unparsed_tool_markup"] == 0
