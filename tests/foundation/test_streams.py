"""A pipeline over a network: transfers follow each other, whatever becomes of what they brought."""

from __future__ import annotations

from functools import partial

import torch
from lq_testing.streams import Stream, recorded_streams
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
