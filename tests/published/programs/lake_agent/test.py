"""What the agent reads of an answer, and what the environment answers to it."""

from rllm.agents.agent import Action
from rllm.agents.frozenlake_agent import FrozenLakeAgent
from rllm.environments.frozenlake.frozenlake import FrozenLakeEnv


def test_the_agent_reads_the_last_fence():
    agent = FrozenLakeAgent(max_steps=8, use_accumulate_history=True)
    agent.reset()
    agent.update_from_env(observation="P _\n_ G", reward=0.0, done=False, info={})
    action = agent.update_from_model("To the right. ```Right```")
    assert isinstance(action, Action)
    assert action.action == "3"
    assert len(agent.trajectory.steps) == 1


def test_a_step_of_the_environment_is_four_values():
    env = FrozenLakeEnv.from_dict({"seed": 3, "size": 4, "p": 0.8})
    observation, info = env.reset()
    observation, reward, done, info = env.step("3")
    assert isinstance(info, dict)
    assert reward in (0.0, 1.0)
    assert isinstance(observation, str)
    assert done in (False, True)
