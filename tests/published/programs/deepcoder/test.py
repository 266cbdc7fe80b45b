"""The tests of a problem decide."""

from prepare_deepcoder_data import prepare_deepcoder_data

from rllm.rewards.code_reward import RewardCodeFn, RewardConfig


def test_only_a_program_that_passes_its_tests_is_paid(tmp_path, monkeypatch):
    monkeypatch.setenv("RLLM_HOME", str(tmp_path))
    train, _ = prepare_deepcoder_data()
    row = train[0]
    reward = RewardCodeFn(RewardConfig())
    right = reward(row, "```python\nprint(2 * int(input()))\n```")
    wrong = reward(row, "```python\nprint(3 * int(input()))\n```")
    assert (right.reward, right.is_correct) == (1.0, True)
    assert (wrong.reward, wrong.is_correct) == (0.0, False)
