import pytest

from rllm.config.loader import load_config
from rllm.errors import ConfigError
from rllm.eval.catalogue import benchmark_named, benchmark_names


def test_every_benchmark_of_the_catalogue_is_a_valid_configuration() -> None:
    assert "frozenlake" in benchmark_names()
    for name in benchmark_names():
        benchmark = benchmark_named(name)
        assert benchmark.name == name
        assert benchmark.description.endswith(".")
        load_config(benchmark.train)


def test_an_unknown_benchmark_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="no benchmark `frozen_lake`; did you mean `frozenlake`"):
        benchmark_named("frozen_lake")
    with pytest.raises(ConfigError, match=r"there are: .*frozenlake"):
        benchmark_named("xyzzy")
