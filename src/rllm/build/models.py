"""The meaning of `--model`: a run, a model directory, or a built-in model that is made now."""

import difflib
import logging
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rllm.build.model_pull import small_models
from rllm.build.providers import BUILTIN, resolve_model
from rllm.config.schema import InferenceConfig, TrainConfig
from rllm.config.supervised import SupervisedConfig
from rllm.data.hub import is_model_id
from rllm.errors import ConfigError, MissingExtraError
from rllm.files.home import rllm_home
from rllm.models.facts import is_from_scratch
from rllm.models.foreign import read_config
from rllm.store.run_directory import RunDirectory, is_run
from rllm.trainer.backends.named import service_kind
from rllm.types.chat_forms import OWN_FORM, ChatForm

if TYPE_CHECKING:
    from rllm.inference.local.client import LocalClient
    from rllm.models.directory import LoadedModel

log = logging.getLogger(__name__)


def local_model_path(name: str) -> Path:
    """Return the run or model directory that a name means for a command that loads weights.

    A model of the hub or of `rllm model pull` is fetched if it is not here. Raises ConfigError for a model on
    a server, and for a name that leads to no run and no model.
    """
    place = resolve_model(name)
    if place.is_server:
        raise ConfigError(
            f"`{name}` is {place.title}, a model on a server, and this command loads weights: give a run, a "
            "model directory, or a name of `rllm model pull`."
        )
    path = Path(place.path)
    model_directory(path)
    return path


def initial_model_path(model: str, base_url: str = "") -> str:
    """`--model` of a command that trains, as `model.path`: of a run its trained model.

    Raises ConfigError for a model on a server.
    """
    if not model and not base_url:
        return ""
    place = resolve_model(model, base_url=base_url)
    if place.is_server:
        raise ConfigError(
            f"{place.name or 'The model'} at {place.base_url} is on a server, and training changes weights, "
            "which have to be here: give its directory in Hugging Face format as --model DIR. A server can "
            "teach a model that is here: rllm distill BENCHMARK --teacher URL --model DIR."
        )
    path = Path(place.path)
    return str(model_directory(path)) if not place.path.startswith(BUILTIN) and is_run(path) else place.path


def settle_model_names(config: TrainConfig | SupervisedConfig) -> None:
    """Replace every name of a model in a configuration, in `model.path`, the paths of policies and
    `distill.teacher`, by the directory of that model.

    A model of the hub or of `rllm model pull` is fetched if it is not here; names of a training service stay.
    Raises ConfigError, naming the key, for a run without a model, and for a name that is nearly right.
    """
    model = config.model
    if isinstance(config, SupervisedConfig):
        model.path = _find_path("model.path", model.path, initial_model_path)
        return
    if service_kind(config.backend) is None:
        model.path = _find_path("model.path", model.path, initial_model_path)
        for name, policy in config.policies.items():
            policy.path = _find_path(f"policies.{name}.path", policy.path, initial_model_path)
    if not config.distill.is_server:
        config.distill.teacher = _find_path("distill.teacher", config.distill.teacher, _teacher_path)


def _find_path(key: str, name: str, find: Callable[[str], str | Path]) -> str:
    if not _may_be_model(name):
        return name
    try:
        return str(find(name))
    except ConfigError as error:
        raise ConfigError(f"`{key}` is {name!r}: {error}") from error


def _may_be_model(name: str) -> bool:
    """Whether a name is that of a model that is here or on the hub, or a misspelt one; reading any other as a
    directory tells what is wrong with it."""
    if not name:
        return False
    is_close = bool(difflib.get_close_matches(name.lower(), small_models(), n=1))
    return name.startswith(BUILTIN) or Path(name).exists() or is_close or is_model_id(name)


def _teacher_path(name: str) -> Path:
    path = local_model_path(name)
    return model_directory(path) if name.startswith(BUILTIN) else path


def tokenizer_directory(name: str) -> Path:
    """Return the directory of the tokenizer that a name means; a directory needs nothing else in it."""
    path = Path(name)
    if not _may_be_model(name) or (path.is_dir() and not is_run(path)):
        return path
    return model_directory(local_model_path(name))


def resolve_form(path: Path, form: ChatForm) -> ChatForm:
    """The form of conversations with the model at `path`: `form`, or where that is the model's own and `path`
    is a run, the one that it was trained with."""
    if form != OWN_FORM or str(path).startswith(BUILTIN) or not is_run(path):
        return form
    settings = RunDirectory.read(path).config().get("model") or {}
    names = {field.name for field in fields(form)} - {"chat_template"}  # the trained model has that one
    return ChatForm(**{name: settings[name] for name in names & settings.keys()})


def model_directory(path: Path) -> Path:
    """The model that `--model` means: a run's trained model, a model directory itself, or `builtin:tiny`."""
    if str(path).startswith(BUILTIN):
        return _builtin(str(path).removeprefix(BUILTIN))
    if not is_run(path):
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path} is neither a run nor a model directory (it has no config.json).")
        return path
    model = RunDirectory.read(path).model_path
    several = sorted(each.name for each in (path / "models").glob("*/"))
    if several:
        raise ConfigError(
            f"The run {path} has the models {', '.join(several)}; give one of them, such as "
            f"{path / 'models' / several[0]}."
        )
    if not model.is_dir():
        raise ConfigError(f"The run {path} has no trained model yet; let `rllm train` finish it first.")
    return model


def is_from_here(path: str) -> bool:
    """Whether rLLM made the model at `path` from random weights."""
    if path.startswith(BUILTIN):
        return True
    if not is_run(Path(path)) and not (Path(path) / "config.json").is_file():
        return False  # loading the model reports what it lacks
    directory = model_directory(Path(path))
    return is_from_scratch(directory, read_config(directory))


def _builtin(preset: str) -> Path:
    """The untrained model of that size, made with seed 0 when it is first asked for."""
    try:
        from rllm.models.builtin import create_model
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "train") from error
    directory = rllm_home() / "models" / f"builtin-{preset}"
    if not directory.is_dir():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=directory.parent, prefix=".making-") as making:
            create_model(Path(making) / "model", preset)
            try:
                (Path(making) / "model").rename(directory)
            except OSError:
                if not directory.is_dir():  # else another process was quicker
                    raise
    return directory


def local_client(
    loaded: "LoadedModel", inference: InferenceConfig, *, max_context: int, num_drafts: int = 0
) -> "LocalClient":
    """The built-in engine with as much room for keys and values as `inference.cache_tokens` says, or where
    that is 0 and not all slots fit, half of the free memory that the model leaves, as of a run.

    Raises ConfigError where one conversation does not fit.
    """
    from rllm.inference.local.cache import tokens_at_once
    from rllm.inference.local.client import LocalClient
    from rllm.trainer import free_memory
    from rllm.trainer.fitting import SHARE, cached_tokens
    from rllm.trainer.memory import readable

    cache_tokens = inference.cache_tokens
    parameter = next(loaded.model.parameters())
    a_token = loaded.num_kv_heads * (2 * loaded.num_layers * loaded.head_dim + 1) * parameter.element_size()
    weights = sum(each.numel() * each.element_size() for each in loaded.model.parameters())
    free = round(SHARE * free_memory.free_bytes(str(parameter.device)))  # with what the weights have already
    room = cached_tokens((free - weights) // 2, a_token)
    if not cache_tokens and room < tokens_at_once(inference.slots, max_context, 0):
        if room < (least := tokens_at_once(1, max_context, 0)):
            raise ConfigError(
                f"Keys and values of one conversation of {max_context} tokens take "
                f"{readable(least * a_token)}, and half of what the model leaves of the free memory has room "
                f"for {readable(max(0, room) * a_token)}; choose fewer tokens (`inference.max_context`, "
                "--max-context), or close other programs."
            )
        log.warning(
            "There is room for the keys and values of %s tokens (%s); conversations that find none wait.",
            f"{room:,}",
            readable(room * a_token),
        )
        cache_tokens = room
    return LocalClient(
        loaded,
        num_slots=inference.slots,
        max_context=max_context,
        max_prefill_tokens=inference.max_prefill_tokens,
        cache_tokens=cache_tokens,
        num_drafts=num_drafts,
        lockstep=inference.lockstep,
    )


def create_builtin(directory: Path, preset: str, seed: int) -> None:
    """Write a built-in model with random weights and its tokenizer to a directory that is absent or empty."""
    from rllm.models.builtin import create_model  # brings torch: not for --help

    create_model(directory, preset, seed)


def model_description(directory: Path, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """The facts of `rllm model info`. Raises ModelDirectoryError naming the missing or broken file."""
    from rllm.models.architectures import architecture_row
    from rllm.models.decoder import Decoder
    from rllm.models.directory import load_model
    from rllm.models.named_templates import NAMES

    model = load_model(directory, trust_remote_code=trust_remote_code)
    return {
        "model": str(directory),
        "architecture": _architecture(model.config),
        "parameters": model.num_parameters,
        **({} if model.model.by_row else _shape(model)),
        "vocabulary": model.vocab_size,
        "reads_images": model.tokenizer.images is not None,
        "context": model.max_positions,
        "end_tokens": {str(token): model.tokenizer.token_text(token) for token in model.end_token_ids},
        "served_by": "built-in decoder" if isinstance(model.model, Decoder) else "transformers",
        "by_row": model.model.by_row,
        "row": architecture_row(str(model.config.get("model_type"))),
        "incremental_template": model.template_is_incremental,
        "chat_template": model.tokenizer.has_chat_template,
        "named_templates": list(NAMES),
        "tools": _tool_facts(model),
    }


def _tool_facts(model: "LoadedModel") -> dict[str, str]:
    """Return the form in which tools are offered to the model, and the one in which it writes calls."""
    from rllm.rendering.tools import tool_format_of

    calls = tool_format_of(model.tokenizer)
    return {"form": model.tokenizer.tool_form, "calls": calls.name if calls else "none that is known"}


def _shape(model: "LoadedModel") -> dict[str, int]:
    """Sizes of the keys and values of a token."""
    return {
        "layers": model.num_layers,
        "key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
    }


def _architecture(config: dict[str, Any]) -> str:
    return (config.get("architectures") or [config.get("model_type", "unknown")])[0]


def architecture_of(directory: Path) -> str:
    """The name in a model directory's config.json."""
    return _architecture(read_config(directory))
