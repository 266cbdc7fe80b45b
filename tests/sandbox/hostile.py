"""Reads hostile.txt: programs that want out, each with its name and the ends that are in order.

    #### name -> ok | not ok | stopped | any | a status          then the program, up to the next such line

In a program `{nonce}` is a word of this attack alone, `{secret}` the path of a file that holds it, `{port}`
and `{socket}` where a server of the attacked listens, `{owner}` its process id. Nobody may ever read the
secret.
"""

from dataclasses import dataclass
from pathlib import Path

from rllm.sandbox import Status

ENDS = {
    "ok": {Status.OK},
    "not ok": set(Status) - {Status.OK},
    "stopped": {Status.TIMEOUT, Status.KILLED, Status.OUT_OF_MEMORY, Status.OUTPUT_LIMIT},
    "any": set(Status),
}
"""Where only the damage counts, any end is in order."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Attack:
    source: str
    ends: set[Status]


def attacks(*, with_packages: bool = False) -> dict[str, Attack]:
    """By name, in the order of the file; `with_packages` also those of hostile_numpy.txt."""
    names = ["hostile.txt", "hostile_numpy.txt"] if with_packages else ["hostile.txt"]
    text = "\n".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in names)
    found: dict[str, Attack] = {}
    for section in ("\n" + text).split("\n#### ")[1:]:
        head, _, rest = section.partition("\n")
        name, _, ends = head.partition(" -> ")
        source = rest.partition("\n###### ")[0].rstrip() + "\n"
        assert name not in found, f"{name} is there twice"
        found[name] = Attack(source=source, ends=ENDS.get(ends) or {Status(ends)})
    return found
