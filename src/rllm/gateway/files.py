"""The limit of open files of this process: each request that is under way is one or two of them."""

import resource


def raised_file_limit() -> int:
    """The limit, once it is as high as it may be: the usual 1,024 is there for programs that use `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return 1 << 22 if hard == resource.RLIM_INFINITY else hard
