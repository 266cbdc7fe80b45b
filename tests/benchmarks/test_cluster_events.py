"""The simulated cluster beside closed forms of queueing theory, and beside what is counted by hand."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from cluster_events import Clock, Run, Service, SharedEngine, Station, Work

PLAIN = Service(decode_fixed_s=0.01, decode_row_s=0.001, prefill_token_s=0.0001, update_token_s=0.001)


def erlang_c(load: float, servers: int) -> float:
    """Mean number in an M/M/c queue with `load` = λ/μ (Erlang 1917)."""
    waits = load**servers / math.factorial(servers) * servers / (servers - load)
    idle = 1.0 / (sum(load**n / math.factorial(n) for n in range(servers)) + waits)
    return load + idle * waits * load / (servers - load)


@pytest.mark.parametrize(("load", "servers"), [(0.6, 1), (2.1, 3), (5.6, 8)])
def test_an_engine_that_is_shared_by_the_rate_of_c_servers_has_the_rows_of_an_mmc_queue(
    load: float, servers: int
) -> None:
    """Births and deaths have the same rates, so the number inside has the same distribution."""
    clock, rng = Clock(), np.random.default_rng(1)
    engine = SharedEngine(clock, lambda rows: max(rows, servers) / servers, num_slots=1 << 30)
    until = 20_000.0

    def arrive() -> None:
        engine.ask(0.0, float(rng.exponential()), lambda: None)
        clock.after(float(rng.exponential(1.0 / load)), arrive)

    clock.after(0.0, arrive)
    clock.run(until)
    assert engine.row_s / until == pytest.approx(erlang_c(load, servers), rel=0.06)


def test_a_station_with_equal_services_waits_as_pollaczek_and_khinchine_say() -> None:
    """M/D/1: ρ / 2(1 - ρ) services (Khinchine 1932)."""
    clock, rng, load = Clock(), np.random.default_rng(2), 0.5
    station, waits = Station(clock), list[float]()

    def arrive() -> None:
        came = clock.now
        station.serve(1.0, lambda: waits.append(clock.now - came - 1.0))
        clock.after(float(rng.exponential(1.0 / load)), arrive)

    clock.after(0.0, arrive)
    clock.run(40_000.0)
    assert np.mean(waits) == pytest.approx(load / (2.0 * (1.0 - load)), rel=0.06)


def test_a_step_without_chance_takes_what_is_counted_by_hand() -> None:
    work = Work(num_tasks=2, group_size=3, prompt_tokens=10, turn_tokens=5)
    report = Run(PLAIN, work, num_samplers=1, num_trainers=2, num_slots=64).report(3)
    reading = 2 * (10 + 1 + 1) * 0.0001
    sampling = 5 * (0.01 + 6 * 0.001)
    update = (2 * 10 + 6 * 5) * 0.001 / 2
    assert report.step_s == pytest.approx(reading + sampling + update)
    assert report.trainer_idle == pytest.approx(1.0 - update / report.step_s)
    assert report.mean_rows == pytest.approx(6.0)


def test_who_finds_no_slot_waits_for_one() -> None:
    work = Work(num_tasks=1, group_size=4, prompt_tokens=0, turn_tokens=10)
    alone = Run(PLAIN, work, num_samplers=1, num_trainers=1, num_slots=1).report(1)
    update = work.trained_tokens * 0.001
    assert alone.step_s == pytest.approx(4 * 10 * 0.011 + 3 * 0.0001 + update)


def test_sampling_ahead_hides_the_shorter_of_the_two() -> None:
    work = Work(num_tasks=4, group_size=8, prompt_tokens=50, turn_tokens=100, environment_s=1.0)
    on = Run(PLAIN, work, num_samplers=2, num_trainers=1, num_slots=64, ahead=0).report(6)
    off = Run(PLAIN, work, num_samplers=2, num_trainers=1, num_slots=64, ahead=1).report(6)
    update = work.trained_tokens * 0.001
    assert off.step_s == pytest.approx(max(update, on.step_s - update), rel=0.01)
    assert off.trainer_idle < on.trainer_idle


def test_drawn_times_have_their_mean_and_a_seed_repeats_them() -> None:
    work = Work(
        num_tasks=64, group_size=8, prompt_tokens=1, turn_tokens=1, environment_s=2.0, environment_spread=1.0
    )
    first, again, other = (
        Run(PLAIN, work, num_samplers=4, num_trainers=1, num_slots=64, seed=seed).report(2).finished
        for seed in (0, 0, 1)
    )
    assert first == again != other
    run = Run(PLAIN, work, num_samplers=1, num_trainers=1, num_slots=1)
    assert np.mean([run._drawn(2.0, 1.0) for _ in range(20_000)]) == pytest.approx(2.0, rel=0.05)
