"""Published commands that are not here, and what takes their place: what groups answer."""

COMMANDS = {
    "login": "there is no service to log in to: keys of model servers are kept by `rllm model setup`",
    "snapshot": "sandboxes are kept warm by themselves (docs/sandbox.md); nothing has to be created before",
    "setup": "`rllm model setup`",
}
"""Published commands without a counterpart of their own."""
