"""Shortages and refusals of the machine, also of paths that cannot be, in a sentence instead of a traceback
of our code.
"""

import errno

_NO_MEMORY = (
    "There is no memory left ({error}). Close other programs, or make the work smaller: fewer attempts at a "
    "time (`rollout.num_parallel`, --concurrency), `inference.num_slots`, `inference.max_context`, or "
    "`optimizer.micro_batch_tokens`. The same command goes on with what was saved."
)
_NO_THREAD = (
    "The system lets this user start no more threads or processes ({error}). Raise the limit (`ulimit -u`, "
    "`pids.max` of the container, or that of memory), close other programs, or lower `rollout.env_workers`. "
    "The same command goes on with what was saved."
)
_NO_FILE = (
    "No more files can be opened ({error}). Raise the limit (`ulimit -n`), or lower `rollout.num_parallel` "
    "or --concurrency. The same command goes on with what was saved."
)
_NO_DISK = (
    "{place} could not be written ({error}). Free space there, and run the same command: it goes on with "
    "what was saved."
)
_NO_PERMISSION = (
    "{place} is closed to you ({error}). Give yourself permission, or choose another place: run directories "
    "are readable by their owner only."
)
_NO_PLACE = (
    "{place} cannot be a file or directory here ({error}). Give another path: a shorter one, that leads "
    "through directories alone."
)
_SENTENCES = {
    errno.ENOMEM: _NO_MEMORY,
    errno.EAGAIN: _NO_THREAD,
    errno.EMFILE: _NO_FILE,
    errno.ENFILE: _NO_FILE,
    errno.ENOSPC: _NO_DISK,
    errno.EDQUOT: _NO_DISK,
    errno.EFBIG: _NO_DISK,
    errno.EROFS: _NO_DISK,
    errno.EIO: _NO_DISK,
    errno.EACCES: _NO_PERMISSION,
    errno.EPERM: _NO_PERMISSION,
    errno.ENAMETOOLONG: _NO_PLACE,
    errno.ENOTDIR: _NO_PLACE,
    errno.EISDIR: _NO_PLACE,
    errno.ELOOP: _NO_PLACE,
}
_WORDS = {
    "can't start new thread": _NO_THREAD,
    "can't allocate memory": _NO_MEMORY,  # torch on a CPU
    "failed to map segment": _NO_MEMORY,  # a library that does not fit
    "could not create a primitive": _NO_MEMORY,  # oneDNN
    "out of memory": _NO_MEMORY,  # torch on an accelerator
}


def sentence_of(error: BaseException) -> str | None:
    """The sentence to print for `error`; None where it is no matter of the machine's, and keeps its
    traceback.
    """
    sentence = _sentence_for(error)
    if sentence is None:
        return None
    # A rename has two names, and the first is that of a temporary file of ours.
    place = getattr(error, "filename2", None) or getattr(error, "filename", None) or "A file"
    reason = getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
    return sentence.format(error=reason, place=place)


def shortage_behind(error: BaseException) -> str | None:
    """The sentence to print instead of an error of ours that a lack of memory or threads caused."""
    cause = error.__cause__
    while cause is not None and _sentence_for(cause) not in (_NO_MEMORY, _NO_THREAD):
        cause = cause.__cause__
    return None if cause is None else sentence_of(cause)


def _sentence_for(error: BaseException) -> str | None:
    if isinstance(error, MemoryError):
        return _NO_MEMORY
    if isinstance(error, OSError):
        return _SENTENCES.get(error.errno or 0)
    if isinstance(error, RuntimeError | ImportError):
        return next((sentence for words, sentence in _WORDS.items() if words in str(error)), None)
    return None
