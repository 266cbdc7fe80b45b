"""The stages of a Dockerfile: which there are, and which the last one needs.

instructions, from the first FROM on ──stages_of──► those of the stages that are built, in order
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rllm.data.dockerfile import DockerLine, fill_line
from rllm.errors import ConfigError


@dataclass(kw_only=True, slots=True, frozen=True)
class BuildStage:
    """One stage."""

    names: tuple[str, ...]
    """Its number, and its name in small letters where it has one."""
    base: str
    """An image, or the name of a stage before it."""
    lines: tuple[DockerLine, ...]
    """Its FROM first."""

    @property
    def origins(self) -> set[str]:
        """Names of what it is made of."""
        flags = [value for line in self.lines for name, value in line.flags if name == "from"]
        return {self.base.lower(), *(each.lower() for each in flags)}

    @property
    def needs_system(self) -> bool:
        """Whether something is run to build it."""
        return any(line.word in ("RUN", "USER") or "from" in dict(line.flags) for line in self.lines)


def stages_of(instructions: Sequence[DockerLine], arguments: Mapping[str, str]) -> list[BuildStage]:
    """The last stage, and before it those that it needs, as Docker builds them.

    `arguments` are those of before the first FROM. Raises ConfigError for a FROM that names no image.
    """
    starts = [place for place, each in enumerate(instructions) if each.word == "FROM"]
    stages: list[BuildStage] = []
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(instructions)], strict=True)):
        words = fill_line(instructions[start], arguments).words
        if not words or not (len(words) == 1 or (len(words) == 3 and words[1].lower() == "as")):
            where, text = instructions[start].where, instructions[start].text
            raise ConfigError(f"{where}: `FROM {text:.80}` names no image.")
        names = (str(number), *(each.lower() for each in words[2:]))
        stages.append(BuildStage(names=names, base=words[0], lines=tuple(instructions[start:end])))
    steps: list[BuildStage] = []
    origins = {stages[-1].names[0]}
    # From the last to the first, because a stage can need only those above it.
    for stage in reversed(stages):
        if origins & set(stage.names):
            steps.append(stage)
            origins |= stage.origins
    return steps[::-1]
