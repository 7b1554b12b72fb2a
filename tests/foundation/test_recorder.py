"""The recorder of streams finds every kind of race, and no other."""

from __future__ import annotations

import torch
from lq_testing.streams import Recorder


def _kinds(recorder: Recorder) -> list[str]:
    return [race.kind for race in recorder.races]


def test_reading_what_another_stream_wrote_needs_a_wait() -> None:
    for waits in (True, False):
        with Recorder() as recorder:
            other, first = recorder.new_stream(), recorder.current
            x = torch.ones(4)
            if waits:
                other.wait_stream(first)
            with recorder.on_stream(other):
                y = x + 1
            if waits:
                first.wait_event(other.record_event())
            y.mul_(2)
        assert _kinds(recorder) == ([] if waits else ["read-write", "write-write"])
        assert y.tolist() == [4.0] * 4


def test_writing_what_another_stream_still_reads_is_a_race_also_through_views() -> None:
    with Recorder() as recorder:
        other = recorder.new_stream()
        x = torch.ones(4)
        other.wait_stream(recorder.current)
        with recorder.on_stream(other):
            kept = x[:2].sum()
        x.view(2, 2)[1].zero_()
    assert _kinds(recorder) == ["read-write"]
    assert "sum" in recorder.races[0].first
    assert "zero_" in recorder.races[0].second
    assert float(kept) == 2.0


def test_memory_freed_while_another_stream_uses_it_is_a_race_unless_it_was_recorded() -> None:
    for recorded in (False, True):
        with Recorder() as recorder:
            other = recorder.new_stream()
            x = torch.ones(4)
            other.wait_stream(recorder.current)
            with recorder.on_stream(other):
                kept = x * 2
                if recorded:
                    recorder.record_use(x)
            del x
            torch.ones(4)
        assert _kinds(recorder) == ([] if recorded else ["freed too early"]), recorder.races
        assert float(kept.sum()) == 8.0


def test_work_of_one_stream_and_reads_of_several_need_no_wait() -> None:
    with Recorder() as recorder:
        other = recorder.new_stream()
        x = torch.ones(4)
        x.mul_(2)
        other.wait_stream(recorder.current)
        with recorder.on_stream(other):
            a = x.sum()
        b = x.sum()
        recorder.current.wait_stream(other)
        assert float(a + b) == 16.0
        del x
        torch.ones(4)
    assert not recorder.races
