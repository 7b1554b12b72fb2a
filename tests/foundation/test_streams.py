"""Pipelines of CUDA streams, and the recorder that finds races between them."""

from __future__ import annotations

from functools import partial

import torch
from lq_testing.streams import Recorder, Stream, recorded_streams
from torch import Tensor

from lq_lightning.foundation.streams import CommPipeline, StreamStage


def _write(tensor: Tensor) -> None:
    tensor.add_(1)


def test_a_transfer_waits_for_what_it_sends_and_not_for_work_on_what_was_received() -> None:
    finished: list[tuple[Stream, dict[int, int]]] = []  # each with the clock of its stream then
    seen: list[int] = []  # how many of them each transfer has waited for
    with recorded_streams() as recorder:
        stages, first = CommPipeline(), recorder.current

        def transfer(sent: Tensor) -> Tensor:
            done = recorder.current.clock
            seen.append(sum(done.get(s.number, 0) >= c[s.number] for s, c in finished))
            return sent.clone()

        def finish(received: Tensor) -> None:
            received.sum()
            finished.append((recorder.current, dict(recorder.current.clock)))

        for _ in range(4):
            stages.make_room()
            sent = torch.ones(8)
            stages.submit(sent, partial(transfer, sent), finish)
            del sent
            torch.ones(8)  # where memory that was let go of too early is handed out again
        # two at most are held, so the third transfer waits until the first is worked on
        assert seen == [0, 0, 1, 2]
        stages.join()
        assert all(first.clock[s.number] >= c[s.number] for s, c in finished)
        torch.ones(8)
    assert not recorder.races


def test_what_was_handed_over_is_held_until_the_stream_it_came_from_has_waited() -> None:
    with recorded_streams() as recorder:
        stage, other = StreamStage(depth=1), recorder.new_stream()
        handed = torch.ones(8)
        stage.submit(handed, partial(_write, handed))
        del handed
        with recorder.on_stream(other):  # of another model, which reduces on a stream of its own
            stage.make_room()
        torch.ones(8)
    assert not recorder.races


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
