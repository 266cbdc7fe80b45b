"""Published commands that are not here, and what takes their place: what groups answer."""

COMMANDS = {
    "login": "there is no service to log in to: keys of model servers are kept by `rllm model setup`",
    "snapshot": "sandboxes are kept warm by themselves (docs/sandbox.md); nothing has to be created before",
    "setup": "`rllm model setup`",
}
"""Published commands without a counterpart of their own."""
DATASET_COMMANDS = {
    "from-eval": "`rllm sft --run DIR` learns from what a run did well (`data.min_reward`, "
    "`data.max_per_task`); `rllm dataset from-runs` writes the rows that workers served",
}
