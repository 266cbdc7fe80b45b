"""The rules of `rllm train` and `rllm eval` about programs: which words mean one."""


def is_program(name: str, *options: str) -> bool:
    """A place to find it, or any option that programs alone have; otherwise it is a benchmark, as the
    address of an environment is."""
    is_place = ":" in name and "://" not in name
    return is_place or name.endswith(".py") or any(options)
