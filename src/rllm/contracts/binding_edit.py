"""Another model in the front matter of a worker.md file, and not a byte else."""

import io
import re

from rllm.contracts.worker_file import parse_contract
from rllm.errors import ContractError, MissingExtraError

_PLAIN = re.compile(r"[A-Za-z0-9_./-]+")


def with_model(text: str, model: str, *, source: str = "worker.md") -> str:
    """The text with `rllm.model` set to `model`. Raises ContractError for a contract that names no model."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise MissingExtraError("yaml", "worker") from error
    parse_contract(text, source=source)
    lines = io.StringIO(text, newline="").readlines()
    end = next(number for number, line in enumerate(lines[1:], 1) if line.strip() == "---")
    front = "".join(lines[1:end])
    root = yaml.compose(front, Loader=yaml.SafeLoader)
    binding = next((value for key, value in root.value if key.value == "rllm"), None)
    values = [] if binding is None else binding.value
    node = next((value for key, value in values if key.value == "model"), None)
    if node is None:
        raise ContractError(
            f"{source}: it names no model that another could take the place of; write `rllm: {{model: …}}`."
        )
    scalar = model if _PLAIN.fullmatch(model) else f'"{model}"'
    new_front = front[: node.start_mark.index] + scalar + front[node.end_mark.index :]
    new_text = lines[0] + new_front + "".join(lines[end:])
    if parse_contract(new_text, source=source).binding.model != model:
        raise ContractError(f"{source}: `{model}` cannot be written as `rllm.model`; rename it.")
    return new_text
