"""Where nodes that come and go meet: who takes part in an outer step, and whether it counts.

[Note: rounds]

An outer step of nodes that may come and go is a *round*, and rounds are numbered. All agreement is
in a store (``torch.distributed.TCPStore``), which a process of its own keeps, in entries that are
written once: the first value that a node proposes is what all read.

*Seats.* A node takes a seat, a number below ``max_nodes``, that is free, or whose owner is gone.
The seat says which part of the data it reads.

*Who takes part.* A round is called by the first node that has taken enough steps; the others come
after the step that they are in. One that sees all expected nodes there, or has waited for long
enough, proposes those who are there as members. Expected are the members of the round before and
those who have announced themselves. Whoever is missing is not waited for again.

*Whether it counts.* After its messages have arrived, each member says so. The round counts once
all have; a member that misses something, or waits for too long, proposes that it does not. Then all
forget what has arrived and try again, as another *attempt*, with those who come to it. So a node
never applies a mean that another does not have.

*Who was away.* The messages of a round lie on the disks of its members for a while. A node that was
not in it fetches and applies them, so its outer state equals the others' again in every bit. A new
node starts from a checkpoint that a member saves for it at the end of a round. If all are gone, it
starts anew with the number of the next round, which counts by itself: so nobody who comes back
takes its state for that of the round before.

*The end.* A node whose training has ended says so when it comes to a round, and its members end
with that round.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from lq_lightning.data_parallel.patient_store import PatientStore
from lq_lightning.foundation.served_files import is_served

_FIRST_PATIENCE = 30.0
_POLL = 0.02
_LISTEN = 0.1  # between looks of a node that trains
_MOST_ATTEMPTS = 10
_PROBE = 1.0  # before missing nodes are looked for, and that long
# Outcomes of an attempt. With the last one a node starts anew, whose state no other node has.
_COUNTS, _DOES_NOT_COUNT, _ANEW = "counts", "does not count", "anew"


class Member(NamedTuple):
    """A node in a round.

    Attributes:
        seat: Its number below ``max_nodes``.
        name: Of its process, so that another one in the same seat is another node.
        step: Optimizer steps of the run, as it counts them.
        taken: Those that it has taken since its last round.
        ends: 1 if its training has ended, with which the run ends.
    """

    seat: int
    name: str
    step: int = 0
    taken: int = 0
    ends: int = 0

    def __str__(self) -> str:
        """Write it for :meth:`read`."""
        return ":".join(map(str, self))

    @classmethod
    def read(cls, text: str) -> Member:
        """Read what ``str`` has written."""
        seat, name, *counts = text.split(":")
        return cls(int(seat), name, *map(int, counts))


def is_last(members: Iterable[Member]) -> bool:
    """Whether the run ends with a round of these members: they agree on each other, so all know."""
    return any(member.ends for member in members)


class Round(NamedTuple):
    """An attempt at a round, with its members in the order of their seats."""

    number: int
    attempt: int
    members: tuple[Member, ...]
    waited: float  # seconds

    @property
    def learned(self) -> int:
        """Members that have taken a step, over whose progress the mean is."""
        return sum(member.taken > 0 for member in self.members)


class Latest(NamedTuple):
    """The last round that counts; 0 is the start of the run, of the node that started it."""

    number: int
    members: tuple[Member, ...]

    def __str__(self) -> str:
        """Write it for :meth:`read`."""
        return json.dumps([self.number, *map(str, self.members)])

    @classmethod
    def read(cls, text: str) -> Latest:
        """Read what ``str`` has written."""
        number, *members = json.loads(text)
        return cls(number, tuple(map(Member.read, members)))


class Meeting:
    """A node's part in the agreement; one rank of the node has it.

    Args:
        address: ``"host:port"`` of ``lq-lightning meet``.
        url: Where others find this node's files, and see that it is alive.
        max_nodes: Number of seats.
        wait: Seconds that a missing node may cost the others: half while they wait for it to come,
            half for its messages.

    Attributes:
        seat: Number of this node below ``max_nodes``, once it has entered.
    """

    def __init__(self, address: str, url: str, *, max_nodes: int, wait: float) -> None:
        self.store = PatientStore(address, _FIRST_PATIENCE)  # until it has answered
        self._ear = PatientStore(address, 10 * wait)  # of the thread that listens
        self._url, self._max_nodes, self._wait = url, max_nodes, wait
        self._name = secrets.token_hex(4)
        self._mine = f"{self._name} {url}"
        self.seat = -1
        self._listened_for = 0
        self._called = 0
        self._deaf: Exception | None = None
        self._ended = threading.Event()
        self._listener: threading.Thread | None = None

    # --- coming ---------------------------------------------------------------------------------

    def enter(self) -> None:
        """Take a seat.

        Raises:
            RuntimeError: All seats are taken by nodes that are alive.
        """
        started, before = time.monotonic(), self.latest()
        self.store.patience = 10 * self._wait
        while True:
            owners = {s: self.store.read(f"seat/{s}") for s in range(self._max_nodes)}
            silent: list[int] = []
            for seat in sorted(owners, key=lambda seat: owners[seat] is not None):
                owner = owners[seat]
                url = (owner or "").partition(" ")[2]
                state = is_served(url, _PROBE) if url else False
                if state is None:
                    silent.append(seat)
                elif not state and self._take(seat, owner):
                    return
            if time.monotonic() > started + self._wait:
                # others may still hear a node that this one does not: it is in their rounds then
                latest = self.latest()
                goes_on = latest is not None and latest != before
                heard = {m.seat for m in latest.members} if latest and goes_on else set()
                if any(self._take(seat, owners[seat]) for seat in silent if seat not in heard):
                    return
                raise RuntimeError(
                    f"all {self._max_nodes} seats are taken by nodes that are alive. Give "
                    "`LocalSteps(max_nodes=...)` on all nodes as many as may take part at a time."
                )
            time.sleep(_LISTEN)

    def _take(self, seat: int, owner: str | None) -> bool:
        taken = self.store.propose(f"seat/{seat}", self._mine, owner or "") == self._mine
        if taken:
            self.seat = seat
        return taken

    def agree_on(self, what: str, facts: Mapping[str, object]) -> None:
        """Refuse to take part with other facts of a kind than the first node has.

        Raises:
            ValueError: Some differ.
        """
        own = {name: repr(value) for name, value in facts.items()}
        found = json.loads(self.store.propose(f"facts/{what}", json.dumps(own)))
        if differ := [n for n in sorted({*own, *found}) if own.get(n) != found.get(n)]:
            name = differ[0]
            raise ValueError(
                f"this node has {name} {own.get(name)}, but the nodes that it would join have "
                f"{found.get(name)}: all need the same. For another run start another "
                "`lq-lightning meet`."
            )

    def latest(self) -> Latest | None:
        """The last round that counts; None before any node has started."""
        text = self.store.read("latest")
        return None if text is None else Latest.read(text)

    def me(self, step: int = 0, taken: int = 0, *, ends: bool = False) -> Member:
        """This node as a member."""
        return Member(self.seat, self._name, step, taken, int(ends))

    def url_of(self, member: Member) -> str | None:
        """Where the files of a node are, if it still has its seat."""
        name, _, url = (self.store.read(f"seat/{member.seat}") or "").partition(" ")
        return url if url and name == member.name else None

    def living(self) -> dict[Member, str]:
        """Others that have the result of the last round, and where their files are."""
        latest = self.latest()
        known = self._known(1 if latest is None else latest.number + 1)
        urls = {m: self.url_of(m) for m in known.values() if m.name != self._name}
        return {m: url for m, url in urls.items() if url and is_served(url, _PROBE)}

    def start_or_find(self) -> dict[Member, str]:
        """Return nodes that train, for a state to start from; none if this one starts the run.

        Raises:
            RuntimeError: The run has ended, or this node does not reach those that train.
        """
        deadline, first = time.monotonic() + self._wait, self.latest()
        while True:
            latest = self.latest()
            if latest is not None and is_last(latest.members):
                raise RuntimeError(
                    f"the run at this meeting point has ended with round {latest.number}. For "
                    "another run start another `lq-lightning meet`."
                )
            if living := self.living():
                return living
            # a node that started has a moment to be heard; without members nobody has started
            gone = latest is None or all(self._answers(m) is False for m in latest.members)
            if gone or time.monotonic() > deadline:
                if not gone and latest != first:
                    raise RuntimeError(
                        "others train, but this node does not reach them. Check the network, and "
                        "start it again."
                    )
                if self._start(latest):
                    return {}
            elif first is not None:
                self.store.write(f"call/{first.number + 1}", self._name)
            time.sleep(_LISTEN)

    def _start(self, latest: Latest | None) -> bool:
        """Start the run, or start it anew after a round whose members are gone."""
        number = 0
        if latest is not None:
            number, counts = latest.number + 1, True
            while counts:  # rounds of which nobody could tell any more
                attempt, counts = self.attempts(number)
                number += counts
            if self.store.propose(f"outcome/{number}/{attempt}", _ANEW) != _ANEW:
                return False
        proposed, before = str(Latest(number, (self.me(),))), "" if latest is None else str(latest)
        return self.store.propose("latest", proposed, before) == proposed

    def ask(self, donor: Member, url: str) -> dict[str, Any] | None:
        """Let a member save its state, and return what it says of it; None if it is gone."""
        latest = self.latest()
        asked_at = 0 if latest is None else latest.number
        heard, looked = time.monotonic(), 0.0
        while True:
            latest = self.latest() or Latest(0, ())
            self.store.write(f"call/{latest.number + 1}", self._name)
            told = json.loads(self.store.read(f"state/{donor.seat}") or "{}")
            if told.get("name") == donor.name and told["round"] > asked_at:
                return dict(told)
            if not self.store.has(f"ask/{donor.seat}"):
                self.store.write(f"ask/{donor.seat}", self._name)
            if time.monotonic() > looked + _PROBE:
                looked, is_there = time.monotonic(), is_served(url, _PROBE)
                if is_there:
                    heard = time.monotonic()
                elif is_there is False or time.monotonic() > heard + self._wait:
                    return None
            time.sleep(_LISTEN)

    def is_asked(self) -> bool:
        """Whether somebody wants this node's state."""
        return self.store.has(f"ask/{self.seat}")

    def offer(self, number: int, path: str, files: Mapping[str, int]) -> None:
        """Tell those who have asked where a state after a round is."""
        told = {"name": self._name, "round": number, "path": path, "files": files}
        self.store.write(f"state/{self.seat}", json.dumps(told))
        self.store.remove(f"ask/{self.seat}")  # who asks meanwhile for a later one asks again

    # --- rounds ---------------------------------------------------------------------------------

    def announce(self, number: int) -> None:
        """Let the members of a round wait for this node, which was not in the one before."""
        self.store.add_to(f"new/{number}", str(self.me()))

    def listen(self, after: int) -> None:
        """Listen in a thread for calls of the round that follows, until :meth:`leave`."""
        self._listened_for = after + 1
        if self._listener is not None:
            return

        def listen() -> None:
            while not self._ended.wait(_LISTEN):
                number = self._listened_for
                try:
                    if self._called < number and self._ear.has(f"call/{number}"):
                        self._called = number
                except Exception as error:  # raised in the thread that trains
                    self._deaf = error
                    return

        self._listener = threading.Thread(target=listen, daemon=True)
        self._listener.start()

    @property
    def is_called(self) -> bool:
        """Whether the round that follows was called."""
        if self._deaf is not None:
            raise self._deaf
        return self._called >= self._listened_for

    def attempts(self, number: int) -> tuple[int, bool]:
        """The newest attempt at a round, and whether it counts; else it is under way or to come."""
        attempt = 0
        while outcome := self.store.read(f"outcome/{number}/{attempt}"):
            if outcome in (_COUNTS, _ANEW):
                return attempt, True
            attempt += 1
        return attempt, False

    def counts(self, number: int, attempt: int) -> bool:
        """Whether an attempt counts, and nobody has started anew with it."""
        return self.store.read(f"outcome/{number}/{attempt}") == _COUNTS

    def members(self, number: int, attempt: int) -> tuple[Member, ...]:
        """Members of an attempt; none before they are known."""
        text = self.store.read(f"members/{number}/{attempt}") or ""
        return tuple(sorted(map(Member.read, filter(None, text.split(",")))))

    def gather(self, number: int, step: int, taken: int, *, ends: bool = False) -> Round | None:
        """Come to a round and wait for the others.

        Args:
            number: That follows the last round of which this node has the result.
            step: Optimizer steps of the run, as this node counts them.
            taken: Those of this node since its last round.
            ends: Whether the run is to end with this round.

        Returns:
            The attempt to take part in; None if this node came too late for it.

        Raises:
            RuntimeError: Another node has this one's seat.
        """
        began = time.monotonic()
        owner = self.store.read(f"seat/{self.seat}")
        if owner is None:
            raise RuntimeError(
                "the meeting point was started again, and knows nothing of this run. Start all "
                "nodes again, the first one from a checkpoint."
            )
        if owner != self._mine:
            raise RuntimeError(
                f"another node has taken seat {self.seat}, as this one could not be reached. Start "
                "this node again: it then joins as a new one."
            )
        attempt, counts = self.attempts(number)
        if counts:
            return None
        if attempt >= _MOST_ATTEMPTS:
            raise RuntimeError(
                f"round {number} has failed {attempt} times: a message has to arrive within half "
                f"of `LocalSteps(wait={self._wait:g})` seconds. Give a larger `wait`."
            )
        me = self.me(step, taken, ends=ends)
        self.store.write(f"call/{number}", self._name)
        self.store.add_to(f"come/{number}/{attempt}", str(me))
        gone: set[str] = set()
        while not (members := self.members(number, attempt)):
            come = self._by_name(f"come/{number}/{attempt}")
            expected = self._known(number)
            missing = expected.keys() - gone - come.keys()
            waited = time.monotonic() - began
            if missing and waited < self._wait / 2:
                if waited > _PROBE:
                    gone |= {name for name in missing if self._answers(expected[name]) is False}
                time.sleep(_POLL)
                continue
            here = sorted(come.values())
            self.store.propose(f"members/{number}/{attempt}", ",".join(map(str, here)))
        if self._name not in {m.name for m in members}:
            if not any(self._answers(m) for m in members):  # nobody is left to conclude it
                self.store.propose(f"outcome/{number}/{attempt}", _DOES_NOT_COUNT)
            return None
        return Round(number, attempt, members, time.monotonic() - began)

    def _answers(self, member: Member) -> bool | None:
        url = self.url_of(member)
        return False if url is None else is_served(url, _PROBE)

    def _known(self, number: int) -> dict[str, Member]:
        """Members of the last round, and who was announced for one, by name."""
        latest = self.latest() or Latest(0, ())
        return {m.name: m for m in latest.members} | self._by_name(f"new/{number}")

    def _by_name(self, key: str) -> dict[str, Member]:
        return {m.name: m for m in map(Member.read, self.store.list(key))}

    def conclude(self, taken: Round, arrived: bool) -> bool:
        """Say whether everything has arrived here, and return whether the round counts."""
        number, attempt, members, _ = taken
        outcome, done = f"outcome/{number}/{attempt}", f"done/{number}/{attempt}"
        if not arrived:
            self.store.propose(outcome, _DOES_NOT_COUNT)
        self.store.add_to(done, self._name)
        deadline, names = time.monotonic() + self._wait / 2, {m.name for m in members}
        while (said := self.store.read(outcome)) is None:
            if names <= self.store.list(done):
                self.store.propose(outcome, _COUNTS)
            elif time.monotonic() > deadline:
                self.store.propose(outcome, _DOES_NOT_COUNT)
            else:
                time.sleep(_POLL)
        if said != _COUNTS:
            return False
        before = self.latest()
        if before is not None and before.number < number:
            self.store.propose("latest", str(Latest(number, members)), str(before))
        return True

    # --- going ----------------------------------------------------------------------------------

    def leave(self) -> None:
        """Listen no more, and give the seat back."""
        self._ended.set()
        self.store.patience = self._ear.patience = 0.0
        if self._listener is not None:
            self._listener.join()
        with suppress(RuntimeError):  # the meeting point may have ended first
            self.store.propose(f"seat/{self.seat}", f"{self._name} ", self._mine)
