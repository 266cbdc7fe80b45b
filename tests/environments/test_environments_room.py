"""The environments room hands its names on without loading what is not asked for."""

import subprocess
import sys

import pytest

from rllm import environments


@pytest.mark.parametrize("name", ["BaseEnv", "FrozenLakeEnv", "GymnasiumEnv", "check_env"])
def test_a_name_is_handed_on_from_its_file(name: str) -> None:
    assert getattr(environments, name).__name__ == name
    assert name in dir(environments)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute `Nonsense`"):
        _ = environments.Nonsense


def test_gymnasium_is_not_loaded_before_somebody_plays() -> None:
    code = "import sys; from rllm.environments import FrozenLakeEnv, GymnasiumEnv\n"
    code += "assert 'gymnasium' not in sys.modules; FrozenLakeEnv(); assert 'gymnasium' in sys.modules"
    source = str(environments.__path__[0]).removesuffix("/rllm/environments")
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {source!r})\n{code}"], check=False
    )
    assert done.returncode == 0
