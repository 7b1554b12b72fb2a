"""Work in stages on streams."""

from __future__ import annotations

from functools import partial

import torch
from lq_testing.streams import recorded_streams
from torch import Tensor

from lq_lightning.foundation.streams import SecondStage


def _write(tensor: Tensor) -> None:
    tensor.add_(1)


def test_what_was_handed_over_is_held_until_the_stream_it_came_from_has_waited() -> None:
    with recorded_streams() as recorder:
        stage, other = SecondStage(depth=1), recorder.new_stream()
        handed = torch.ones(8)
        stage.submit(handed, partial(_write, handed))
        del handed
        with recorder.on_stream(other):  # of another model, which reduces on a stream of its own
            stage.make_room()
        torch.ones(8)
    assert not recorder.races
