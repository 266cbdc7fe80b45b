"""Where randomness comes from: a seed for every draw, made from what the draw is for.

There is no generator that is handed around and drawn from in turn. So results depend neither on concurrency
nor on the order in which rollouts finish, and a resumed run draws what the uninterrupted one would have
drawn.
"""

import hashlib


def draw_seed(*key: str | int) -> int:
    """63-bit seed of a structured key, such as (run seed, phase, step, task, attempt, turn, purpose)."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
