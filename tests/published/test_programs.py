"""Programs in the published style, unmodified: two steps of training each on the built-in tiny model."""

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rllm.data.registry import DatasetRegistry
from rllm.errors import ConfigError, MissingExtraError

PROGRAMS = Path(__file__).parent / "programs"
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # published programs close no client
]


def configuration(**rllm_sections: Any) -> dict[str, Any]:
    """A published tree with what a script sets, small enough for the tiny model."""
    trainer = {"total_batches": 2, "test_freq": -1, "project_name": "published", "experiment_name": "tiny"}
    return {
        "model": {"name": "builtin:tiny", "lora_rank": 0},
        "training": {"group_size": 2, "learning_rate": 1e-4},
        "data": {"train_batch_size": 2, "max_prompt_length": 192, "max_response_length": 8},
        "rllm": {"backend": "tinker", "trainer": trainer, **rllm_sections},
    }


def script(directory: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The training script as its own directory sees it."""
    monkeypatch.syspath_prepend(str(PROGRAMS / directory))
    spec = importlib.util.spec_from_file_location(f"published_{directory}", PROGRAMS / directory / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    for split, count in (("train", 8), ("test", 2)):
        rows = [{"question": f"{n} + 1?", "ground_truth": str(n + 1)} for n in range(count)]
        DatasetRegistry.register_dataset("sums", rows, split)


def test_without_its_extra_the_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLLM_BACKEND", raising=False)
    tree = change(change(configuration(), "model.lora_rank", 32), "model.name", "models/Qwen3-0.6B")
    with pytest.raises(MissingExtraError, match=r"rllm\[tinker\]"):
        script("lake_agent", monkeypatch).main(tree)
    with pytest.raises(ConfigError, match="RLLM_BACKEND=local"):
        script("math", monkeypatch).main(configuration())


@pytest.mark.parametrize("directory", ["math", "lake_agent", "solver_judge"])
def test_a_program_trains_two_steps(
    directory: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RLLM_BACKEND", "local")
    result = script(directory, monkeypatch).main(configuration())
    assert result.directory == Path("runs/published-tiny")
    assert result.model_path.is_dir()
    assert "RLLM_BACKEND=local runs in its place" in caplog.text


def change(tree: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    return {**tree, first: change(tree.get(first, {}), rest, value) if rest else value}


def test_a_key_without_counterpart_is_refused_by_its_name(subtests: pytest.Subtests) -> None:
    for key, value, message in [
        ("training.eps", 1e-6, "`training.eps` is 1e-06, and only 1e-08 is honoured"),
        ("rllm.async_training.enable", "maybe", "`rllm.async_training.enable` is 'maybe'"),
        ("rllm.async_training.mini_batch_size", 4, "`rllm.async_training.enable` is not true"),
        ("rllm.async_training.trigger_parameter_sync_step", 2, "and only 1 is honoured"),
        ("rllm.algorithm.adv_estimator", "echo", "`rllm.algorithm.adv_estimator` is 'echo'"),
        ("training.learning_rat", 1.0, "Did you mean `training.learning_rate`?"),
        ("rllm.data.train_batch_size", 4, "`data.train_batch_size`, 2 and `rllm.data.train_batch_size`, 4"),
    ]:
        with subtests.test(key=key, value=value, message=message):
            from rllm.integrations.tinker.keys import translate

            with pytest.raises(ConfigError) as refusal:
                translate(change(configuration(), key, value), 8)
            assert message in str(refusal.value)


def test_published_keys_become_ours() -> None:
    from rllm.integrations.tinker.keys import translate

    ours = translate(
        configuration(
            algorithm={"norm_adv_by_std_in_grpo": False, "eps_clip_high": 0.28, "warmup_steps_ratio": 0.5},
            rollout={"train": {"temperature": 0.8}},
        ),
        8,
    )
    assert ours["model"] == {"path": "builtin:tiny"}
    assert ours["algorithm"]["estimator"] == "dr_grpo"
    assert (ours["algorithm"]["clip_low"], ours["algorithm"]["clip_high"]) == (0.2, 0.28)
    assert ours["rollout"]["group_size"] == 2
    assert ours["rollout"]["max_tokens_per_turn"] == 8
    assert ours["optimizer"]["warmup_steps"] == 1
    assert ours["inference"]["max_context"] == 200


def test_published_asynchronous_training_samples_while_it_learns() -> None:
    from rllm.integrations.tinker.keys import translate

    tree = configuration(async_training={"enable": True, "mini_batch_size": 4, "staleness_threshold": 0.5})
    ours = translate(tree, 8)
    assert ours["schedule"] == {"kind": "async", "max_staleness": 1}
    assert (ours["rollout"]["tasks_per_step"], ours["inference"]["lockstep"]) == (4, False)


def test_every_published_estimator_has_a_key_of_ours() -> None:
    from rllm.integrations.tinker.keys import translate
    from rllm.published.estimators import PublishedEstimator

    for each in PublishedEstimator:
        ours = translate(configuration(algorithm={"adv_estimator": str(each)}), 8)
        assert ours["algorithm"]["estimator"] == each


def test_a_composed_tree_is_taken_whole() -> None:
    hydra = pytest.importorskip("hydra")
    from rllm.integrations.tinker.keys import translate

    with hydra.initialize_config_module("rllm.trainer.config", version_base=None):
        tree = hydra.compose("unified", ["rllm/backend=tinker", "training.group_size=4"])
    ours = translate(tree, 64)
    assert ours["rollout"]["group_size"] == 4
    assert ours["steps"] == 20


TREES = [
    ("unified", ["rllm/backend=tinker", "training.group_size=4"], "training"),
    ("unified", ["rllm/backend=verl"], "actor_rollout_ref"),
    ("agent_ppo_trainer", [], "actor_rollout_ref"),
    ("tinker_rl_trainer", [], "sampling"),
]


@pytest.mark.parametrize(("name", "words", "section"), TREES)
def test_every_published_tree_composes(
    name: str, words: list[str], section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those for verl begin with its own files, which stand in for the installed package here."""
    hydra = pytest.importorskip("hydra")
    files = tmp_path / "verl" / "trainer" / "config"
    (files / "actor").mkdir(parents=True)
    (tmp_path / "verl" / "__init__.py").touch()
    (files / "actor" / "plain.yaml").write_text("actor_rollout_ref: {actor: {lr: 1.0}}\n")
    (files / "ppo_trainer.yaml").write_text(
        "defaults:\n- actor@_global_: plain\ndata: {train_batch_size: 8}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with hydra.initialize_config_module("rllm.trainer.config", version_base=None):
        assert section in hydra.compose(name, words)


def test_the_directory_of_trees_has_those_of_an_installed_verl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib
    import importlib.resources

    files = tmp_path / "verl" / "trainer" / "config"
    files.mkdir(parents=True)
    (tmp_path / "verl" / "__init__.py").touch()
    (files / "ppo_trainer.yaml").write_text("data: {}\n")
    trees: Any = importlib.resources.files(importlib.import_module("rllm.trainer.config"))
    for name in ("unified", "agent_ppo_trainer", "tinker_rl_trainer", "rllm/backend/verl"):
        assert trees.joinpath(f"{name}.yaml").is_file()
    monkeypatch.syspath_prepend(str(tmp_path))
    trees = importlib.resources.files(importlib.import_module("rllm.trainer.config"))
    assert trees.joinpath("ppo_trainer.yaml") == files / "ppo_trainer.yaml"
    assert {"unified.yaml", "ppo_trainer.yaml"} <= {each.name for each in trees.iterdir()}


def test_the_tree_of_tinkers_own_trainer_is_translated() -> None:
    import yaml

    from rllm.integrations.tinker.keys import translate
    from rllm.published import config_files

    text = (Path(config_files.__file__).parent / "config" / "tinker_rl_trainer.yaml").read_text()
    ours = translate({key: value for key, value in yaml.safe_load(text).items() if key != "hydra"}, 64)
    assert ours["rollout"]["group_size"] == 16
    assert ours["algorithm"]["estimator"] == "dr_grpo"
    assert ours["steps"] == 20


def test_a_tree_for_verl_is_one_without_a_word_of_it() -> None:
    from rllm.trainer.backends.named import published_backend

    section = {"rllm": {"agent": {"max_steps": 3}}}
    assert published_backend({**section, "actor_rollout_ref": {}}) == "verl"
    assert published_backend(section) == "tinker"
    assert published_backend({"rllm": {"backend": "tinker"}, "actor_rollout_ref": {}}) == "tinker"
