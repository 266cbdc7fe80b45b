# verl has an environment of its own.
# pyright: reportMissingImports=false
"""The choices of a script in the configuration that Hydra composed for it; imports nothing of verl.

    hundreds of keys, resolved or not ──► those whose value is neither of verl's `ppo_trainer`, nor of the
                                          published `agent_ppo_trainer` ──► `keys`

A value that only follows from a chosen one, such as `rollout.prompt_length` from `data.max_prompt_length`,
was not chosen.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from rllm.integrations.verl.tables import PUBLISHED_DEFAULTS
from rllm.integrations.verl.trees import leaves, nested

MARK = "_target_"
"""A key that Hydra's own files have, and nobody types."""


def is_composed(config: Mapping[str, Any]) -> bool:
    """Whether it holds all keys of verl, not only those that a script sets."""
    return any(key.rpartition(".")[2] == MARK for key, _ in leaves(as_dict(config, resolve=False)))


def as_dict(config: Mapping[str, Any], *, resolve: bool) -> dict[str, Any]:
    """A dict of a mapping, which may be OmegaConf's, whose references it resolves, or leaves as they are
    written."""
    if type(config).__module__.partition(".")[0] == "omegaconf":
        from omegaconf import OmegaConf

        container: Any = OmegaConf.to_container(cast(Any, config), resolve=resolve)
        return container
    return {str(key): each for key, each in config.items()}


def script_values(config: Any) -> dict[str, Any]:
    """The values that the script sets, by whole key. verl has to be installed: its files have the
    defaults."""
    from omegaconf import OmegaConf

    script_config = OmegaConf.create(config) if isinstance(config, dict) else config
    defaults = _defaults()
    defaults_by_key = {**dict(leaves(OmegaConf.to_container(defaults, resolve=False))), **PUBLISHED_DEFAULTS}
    values = dict(leaves(OmegaConf.to_container(script_config, resolve=False)))
    different = {
        key: value
        for key, value in values.items()
        if key not in defaults_by_key or defaults_by_key[key] != value
    }
    direct = {key: value for key, value in different.items() if not _follows(key, defaults_by_key)}
    # A value that follows from others counts as chosen where these would give another.
    expected = OmegaConf.merge(defaults, OmegaConf.create(nested(direct)))
    return {
        key: OmegaConf.select(script_config, key)
        for key in different
        if key in direct or OmegaConf.select(expected, key) != OmegaConf.select(script_config, key)
    }


def _follows(key: str, defaults: Mapping[str, Any]) -> bool:
    """Whether other keys say it, or the section that it stands in."""
    while key:
        if "${" in str(defaults.get(key, "")):
            return True
        key = key.rpartition(".")[0]
    return False


def _defaults() -> Any:
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    spec = importlib.util.find_spec("verl")
    assert spec is not None, "it is installed"
    assert spec.submodule_search_locations is not None, "it is a package"
    directory = Path(spec.submodule_search_locations[0]) / "trainer" / "config"
    with initialize_config_dir(config_dir=str(directory), version_base=None):
        defaults = compose("ppo_trainer")
    OmegaConf.set_struct(defaults, False)
    return defaults
