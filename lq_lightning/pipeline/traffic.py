"""Counters of what stages send to each other."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from .boundary import Message

__all__ = ["BoundaryTraffic"]


@dataclass(slots=True)
class BoundaryTraffic:
    """What this rank sent to neighbouring stages on other ranks since the start.

    Attributes:
        forward_bytes: Bytes of payloads of hidden states.
        forward_values: Values in them.
        backward_bytes: Bytes of payloads of gradients.
        backward_values: Values in them.
        evaluation_bytes: Bytes of payloads sent in evaluation, which are not counted above.
        table_bytes: Bytes of width tables, which are not counted above.
    """

    forward_bytes: int = 0
    forward_values: int = 0
    backward_bytes: int = 0
    backward_values: int = 0
    evaluation_bytes: int = 0
    table_bytes: int = 0

    def count(self, message: Message, nbytes: int, values: int) -> None:
        """Add one payload of ``nbytes`` that carries ``values``."""
        if not message.training:
            self.evaluation_bytes += nbytes
        elif message.backward:
            self.backward_bytes += nbytes
            self.backward_values += values
        else:
            self.forward_bytes += nbytes
            self.forward_values += values

    @property
    def sent(self) -> int:
        """All bytes sent by this rank."""
        payloads = self.forward_bytes + self.backward_bytes + self.evaluation_bytes
        return payloads + self.table_bytes

    def snapshot(self) -> BoundaryTraffic:
        """A copy that does not go on counting."""
        return replace(self)

    def since(self, earlier: BoundaryTraffic) -> BoundaryTraffic:
        """What was counted after ``earlier`` was taken."""
        values = {f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)}
        return BoundaryTraffic(**values)
