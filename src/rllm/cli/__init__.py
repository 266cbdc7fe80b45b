"""The `rllm` command: `main` finds the command that was typed; each command has a file of its own."""
