"""A rank judges the beats of all, by a clock of the test's own."""

from rllm.distributed.heartbeat import DEAD_AFTER_S, Beat, RankWatch

TIMEOUT_S = 100.0


class Ranks:
    """Their beats, and a watch that looks at them every second."""

    def __init__(self, size: int) -> None:
        self.beats = {number: Beat(place=f"place {number}") for number in range(size)}
        self.now_s = 0.0
        self.watch = RankWatch(size, TIMEOUT_S, self.now_s)

    def pass_time(self, seconds: float, *, working: tuple[int, ...] = (), dead: tuple[int, ...] = ()) -> str:
        """The trouble at the end of it, or as soon as there is some."""
        for _ in range(int(seconds)):
            self.now_s += 1.0
            for number, beat in self.beats.items():
                self.beats[number] = Beat(
                    alive=beat.alive + (number not in dead),
                    progress=beat.progress + (number in working),
                    is_waiting=beat.is_waiting,
                    num_collectives=beat.num_collectives,
                    place=beat.place,
                )
            self.watch.look(self.beats, self.now_s)
            if trouble := self.watch.trouble(self.now_s):
                return trouble
        return ""


def test_a_rank_that_hangs_is_named_while_the_others_wait_for_it() -> None:
    ranks = Ranks(3)
    ranks.beats[0].is_waiting = ranks.beats[2].is_waiting = True
    assert ranks.pass_time(TIMEOUT_S) == ""
    assert ranks.pass_time(2).startswith("Rank 1 hangs: for 100 s (`distributed.timeout_s`)")
    assert "at place 1" in ranks.pass_time(1)


def test_inside_a_layer_the_rank_hangs_that_has_begun_fewer_collectives() -> None:
    for hanging in range(3):
        ranks = Ranks(3)
        for number, beat in ranks.beats.items():
            beat.num_collectives = 7 + (number != hanging)
        assert ranks.pass_time(TIMEOUT_S) == ""
        assert ranks.pass_time(2).startswith(f"Rank {hanging} hangs")


def test_a_rank_that_waits_in_a_layer_for_one_that_works_does_not_hang() -> None:
    ranks = Ranks(2)
    ranks.beats[0].num_collectives = 1
    assert ranks.pass_time(3 * TIMEOUT_S, working=(1,)) == ""
    assert ranks.pass_time(TIMEOUT_S + 2).startswith("Rank 1 hangs")


def test_a_rank_that_hangs_ahead_of_the_others_is_named_once_they_have_come_to_it() -> None:
    ranks = Ranks(2)
    ranks.beats[1].num_collectives = 5
    assert ranks.pass_time(50, working=(0,)) == ""
    ranks.beats[0].num_collectives = 6
    assert ranks.pass_time(TIMEOUT_S + 2).startswith("Rank 1 hangs")


def test_ranks_that_all_wait_for_each_other_end() -> None:
    ranks = Ranks(2)
    for beat in ranks.beats.values():
        beat.is_waiting = True
    assert ranks.pass_time(TIMEOUT_S) == ""
    assert "for 100 s" in ranks.pass_time(2)


def test_a_rank_whose_process_is_gone_is_named_long_before() -> None:
    ranks = Ranks(2)
    ranks.beats[0].num_collectives = 1
    assert ranks.pass_time(DEAD_AFTER_S, working=(0,), dead=(1,)) == ""
    assert ranks.pass_time(2, dead=(1,)).startswith("Rank 1 has given no sign of life for 25 s")
