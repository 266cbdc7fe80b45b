"""Errors that a machine gives when it is full, interrupted or broken.

Standard library alone: sandboxes run this module as well (`rllm.sandbox.bundle`).
"""

import errno

MACHINE_ERRNOS = frozenset(
    (
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EINTR, errno.EAGAIN),
        *(errno.EIO, errno.ENOBUFS),
    )
)
"""Never the fault of files that a program left, except ENOSPC on the program's own disk."""
