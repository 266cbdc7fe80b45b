"""What `rllm train` and `rllm eval` know about programs: which words mean one."""


def is_program(name: str, *options: str) -> bool:
    """A place to find it, or any option that programs alone have; otherwise it is a benchmark."""
    return ":" in name or name.endswith(".py") or any(options)
