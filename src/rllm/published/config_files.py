"""`pkg://rllm.trainer.config` for Hydra: the published configuration files, and those of an installed verl.

rllm.trainer.config ──► config/: unified, agent_ppo_trainer, tinker_rl_trainer
                   └──► verl/trainer/config/: ppo_trainer, which ours begin with
"""

from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path


def package_spec(fullname: str) -> ModuleSpec | None:
    """The directory with the published configuration files, under its published name."""
    path = _CONFIG_DIRECTORY / "__init__.py"
    return spec_from_file_location(
        fullname,
        path,
        loader=_ConfigLoader(fullname, str(path)),
        submodule_search_locations=[str(_CONFIG_DIRECTORY)],
    )


_CONFIG_DIRECTORY = Path(__file__).parent / "config"


class _ConfigLoader(SourceFileLoader):
    """Lists configuration files for Hydra: ours and, where verl is installed, those that ours begin with."""

    def get_resource_reader(self, name: str) -> "_ConfigLoader":  # pyright: ignore
        return self

    def files(self) -> "_ConfigFiles":
        verl = find_spec("verl")
        packages = [] if verl is None else list(verl.submodule_search_locations or ())
        return _ConfigFiles([_CONFIG_DIRECTORY, *(Path(each) / "trainer" / "config" for each in packages)])


class _ConfigFiles:
    """Several directories as one, the first of which wins."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = directories

    def joinpath(self, name: str) -> Path:
        places = [directory / name for directory in self._directories]
        return next((place for place in places if place.exists()), places[0])

    def iterdir(self) -> Iterator[Path]:
        for directory in self._directories:
            yield from directory.iterdir()
