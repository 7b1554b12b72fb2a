"""Nodes that agree on seats and rounds, each a thread of one process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from lq_lightning.data_parallel import meeting, patient_store
from lq_lightning.data_parallel.config import split_address
from lq_lightning.data_parallel.meeting import Latest, Meeting, Member, Round, is_last
from lq_lightning.data_parallel.patient_store import PatientStore, keep_meeting_point

WAIT = 2.0


class Nodes:
    """Nodes of one meeting point, of which a test says who is alive (None: it does not answer)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = keep_meeting_point(0)
        self.address = f"127.0.0.1:{self.store.port}"
        self.alive: dict[str, bool | None] = {}
        self.made: list[Meeting] = []
        monkeypatch.setattr(meeting, "is_served", lambda url, _: self.alive[url])
        monkeypatch.setattr(meeting, "_PROBE", 0.1)
        monkeypatch.setattr(meeting, "_LISTEN", 0.02)
        monkeypatch.setattr(patient_store, "_OPERATION", 1.0)

    def make(self, max_nodes: int = 3, wait: float = WAIT) -> Meeting:
        """A node that has not entered."""
        url = f"u{len(self.made)}"
        self.alive[url] = True
        self.made.append(Meeting(self.address, url, max_nodes=max_nodes, wait=wait))
        return self.made[-1]

    def enter(self, count: int, wait: float = WAIT) -> list[Meeting]:
        """Nodes that have entered, the first of which has started the run with all of them."""
        nodes = [self.make(wait=wait) for _ in range(count)]
        for node in nodes:
            node.enter()
        latest = Latest(0, tuple(node.me() for node in nodes))
        assert nodes[0].store.propose("latest", str(latest)) == str(latest)
        return nodes

    def kill(self, node: Meeting, answers: bool | None = False) -> None:
        """Let a process end, or its machine."""
        self.alive[f"u{self.made.index(node)}"] = answers


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    made = Nodes(monkeypatch)
    yield made
    for node in made.made:
        node.leave()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run calls at the same time, and return their results."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(10) for future in [pool.submit(call) for call in calls]]


def _gather(number: int, *nodes: Meeting) -> list[Round]:
    return together(*(lambda n=n: n.gather(number, 0, 1) for n in nodes))


def _conclude(taken: list[Round], *nodes: Meeting) -> list[bool]:
    pairs = zip(nodes, taken, strict=True)
    return together(*(lambda n=n, t=t: n.conclude(t, True) for n, t in pairs))


def _gather_alone(nodes: Nodes, node: Meeting) -> Round:
    """Let a node take round 1 while no other one is there."""
    for other in nodes.made:
        nodes.kill(other, other is node)
    taken = node.gather(1, 0, 1)
    for other in nodes.made:
        nodes.kill(other, True)
    assert taken is not None
    assert taken.members == (node.me(taken=1),)
    return taken


# --- coming -------------------------------------------------------------------------------------


def test_seats(nodes: Nodes) -> None:
    first, second, third, fourth = (nodes.make() for _ in range(4))
    for seat, node in enumerate((first, second, third)):
        node.enter()
        assert node.seat == seat
    fourth._wait = 0.3
    with pytest.raises(RuntimeError, match="all 3 seats are taken by nodes that are alive"):
        fourth.enter()
    nodes.kill(second)
    fourth.enter()
    assert fourth.seat == 1
    second.leave()  # does not give away what is not its own
    assert fourth.url_of(fourth.me()) == "u3"
    with pytest.raises(RuntimeError, match="another node has taken seat 1"):
        second.gather(1, 0, 0)
    third.leave()
    fifth = nodes.make()
    fifth.enter()
    assert fifth.seat == 2


def test_seats_of_silent_machines(nodes: Nodes) -> None:
    """They are free after a while, if others do not hear them either."""
    first, second, third = nodes.enter(3, wait=0.4)
    for node in (second, third):
        nodes.kill(node, None)
    fourth = nodes.make(wait=0.4)
    heard = str(Latest(1, (first.me(), second.me())))
    threading.Timer(0.2, first.store.write, ("latest", heard)).start()
    began = time.monotonic()
    fourth.enter()
    assert time.monotonic() - began > 0.4
    assert fourth.seat == third.seat


def test_facts(nodes: Nodes) -> None:
    first, second = nodes.make(), nodes.make()
    first.agree_on("options", {"every": 2, "bits": None})
    second.agree_on("options", {"bits": None, "every": 2})
    second.agree_on("model", {"every": 3})
    with pytest.raises(ValueError, match=r"has every 3, but the nodes .* have 2: all need"):
        second.agree_on("options", {"every": 3, "bits": None})


def test_one_starts(nodes: Nodes) -> None:
    """Others find it, whenever they come; who starts anew after it is at another round."""
    many = [nodes.make() for _ in range(3)]
    for node in many:
        node.enter()
    found = together(*(node.start_or_find for node in many))
    starters = [node for node, living in zip(many, found, strict=True) if not living]
    assert len(starters) == 1
    started = starters[0].me()
    assert all(living in ({}, {started: f"u{started.seat}"}) for living in found)
    latest = many[0].latest()
    assert latest == Latest(0, (started,))
    for node in many:
        nodes.kill(node)
    late = nodes.make()
    late.seat = 2
    assert late.start_or_find() == {}
    assert late.latest() == Latest(1, (late.me(),))
    assert starters[0].attempts(1) == (0, True)  # of which nobody has the messages


def test_who_starts_anew_does_not_stop_who_trains(nodes: Nodes) -> None:
    first, second = nodes.enter(2)
    taken = _gather_alone(nodes, first)
    assert first.conclude(taken, True)
    second.announce(2)  # it was away, and has the result of round 1
    nodes.kill(first)
    third = nodes.make(wait=0.3)
    third.enter()
    assert third.start_or_find() == {second.me(): "u1"}
    nodes.kill(second, None)
    second.store.write("latest", str(Latest(2, (second.me(),))))
    third._wait, before = 0.5, third.latest

    def taken_meanwhile() -> Latest | None:
        if third.store.has("call/3"):  # those who train come when they are called
            third.store.write("latest", str(Latest(3, (second.me(),))))
        return before()

    third.latest = taken_meanwhile  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="this node does not reach them"):
        third.start_or_find()
    third.latest = before  # type: ignore[method-assign]
    assert third.start_or_find() == {}  # nobody comes
    assert third.latest() == Latest(4, (third.me(),))


def test_a_round_nobody_can_tell_of_is_passed_over(nodes: Nodes) -> None:
    """Its last member died between its outcome and the entry of the last round."""
    (first,) = nodes.enter(1)
    first.store.propose("outcome/1/0", "does not count")
    first.store.propose("outcome/1/1", "counts")
    nodes.kill(first)
    second = nodes.make()
    second.enter()
    assert second.start_or_find() == {}
    assert second.latest() == Latest(2, (second.me(),))


# --- rounds -------------------------------------------------------------------------------------


def test_all_come(nodes: Nodes) -> None:
    many = nodes.enter(3)
    names = [node.me().name for node in many]
    first, second, third = together(
        lambda: many[0].gather(1, 7, 2),
        lambda: many[1].gather(1, 6, 0),
        lambda: many[2].gather(1, 5, 1),
    )
    members = (Member(0, names[0], 7, 2), Member(1, names[1], 6, 0), Member(2, names[2], 5, 1))
    assert first[:3] == second[:3] == third[:3] == (1, 0, members)
    assert first.learned == 2
    assert not is_last(first.members)
    assert _conclude([first, second, third], *many) == [True] * 3
    assert many[2].latest() == Latest(1, members)
    assert many[0].attempts(1) == (0, True)
    assert many[0].gather(1, 7, 2) is None  # it counts already


def test_a_missing_node_is_left_out(nodes: Nodes) -> None:
    """After half the time if its machine does not answer, at once if its process is gone."""
    first, second, third = nodes.enter(3)
    nodes.kill(third, None)
    taken = _gather(1, first, second)
    assert [m.seat for m in taken[0].members] == [0, 1]
    assert WAIT / 2 < max(t.waited for t in taken) < 0.9 * WAIT
    assert _conclude(taken, first, second) == [True, True]
    assert third.gather(1, 0, 1) is None  # it comes too late

    began = time.monotonic()
    taken_2 = _gather(2, first, second)  # it is not waited for again
    assert time.monotonic() - began < WAIT / 4
    assert _conclude(taken_2, first, second) == [True, True]

    third.announce(3)
    began = time.monotonic()
    assert [m.seat for m in _gather(3, first, second)[0].members] == [0, 1]
    assert WAIT / 2 < time.monotonic() - began < 0.9 * WAIT
    nodes.kill(third)
    first.store.propose("outcome/3/0", "does not count")
    began = time.monotonic()
    assert [m.seat for m in _gather(3, first, second)[0].members] == [0, 1]
    assert time.monotonic() - began < WAIT / 3


def test_an_announced_node_is_waited_for(nodes: Nodes) -> None:
    first, second, third = nodes.enter(3)
    taken = _gather_alone(nodes, first)
    assert first.conclude(taken, True)
    third.announce(2)
    pool = ThreadPoolExecutor(1)
    early = pool.submit(first.gather, 2, 0, 1)
    time.sleep(0.3)
    assert not early.done()
    assert third.gather(2, 0, 1)[:3] == early.result(5)[:3]  # type: ignore[index]
    pool.shutdown()


def test_all_or_none(nodes: Nodes) -> None:
    """A round counts nowhere if a member has not got it, or does not say so in time."""
    first, second, third = nodes.enter(3)
    taken = _gather(1, first, second, third)
    pairs = zip((first, second, third), taken, (True, False, True), strict=True)
    said = together(*(lambda n=n, t=t, a=a: n.conclude(t, a) for n, t, a in pairs))
    assert said == [False] * 3
    assert first.attempts(1) == (1, False)
    taken = _gather(1, first, second, third)
    assert {t.attempt for t in taken} == {1}
    began = time.monotonic()
    nodes.kill(third)
    assert _conclude(taken[:2], first, second) == [False, False]
    assert WAIT / 2 < time.monotonic() - began < 0.9 * WAIT
    taken = _gather(1, first, second)
    assert {t.attempt for t in taken} == {2}
    assert _conclude(taken, first, second) == [True, True]
    assert second.latest() == Latest(1, taken[0].members)
    assert not third.conclude(Round(1, 1, taken[0].members, 0.0), True)  # it is too late


def test_members_that_die_before_they_conclude(nodes: Nodes) -> None:
    first, second = nodes.enter(2)
    taken = _gather_alone(nodes, first)
    assert second.gather(1, 0, 1) is None  # the member may still conclude
    assert first.attempts(1) == (0, False)
    nodes.kill(first)
    assert second.gather(1, 0, 1) is None
    again = second.gather(1, 0, 1)
    assert again is not None
    assert again[:3] == (1, 1, (second.me(taken=1),))
    assert not first.conclude(taken, True)


def test_the_end_is_known_to_all_members(nodes: Nodes) -> None:
    first, second, third = nodes.enter(3)
    taken = together(
        lambda: first.gather(1, 0, 1),
        lambda: second.gather(1, 0, 0, ends=True),
        lambda: third.gather(1, 0, 1),
    )
    assert [is_last(t.members) for t in taken] == [True] * 3
    assert third.start_or_find()  # it does not count
    assert _conclude(taken, first, second, third) == [True] * 3
    with pytest.raises(RuntimeError, match="has ended with round 1"):
        third.start_or_find()


def test_rounds_that_always_fail(nodes: Nodes) -> None:
    (first,) = nodes.enter(1)
    for attempt in range(10):
        taken = first.gather(1, 0, 1)
        assert taken is not None
        assert taken.attempt == attempt
        assert not first.conclude(taken, False)
    with pytest.raises(RuntimeError, match=r"has failed 10 times.*Give a larger `wait`"):
        first.gather(1, 0, 1)


def test_calls_are_heard(nodes: Nodes) -> None:
    first, second = nodes.enter(2)
    first.listen(0)
    first.store.write("call/2", "x")
    time.sleep(0.1)
    assert not first.is_called
    _gather_alone(nodes, second)
    _until(lambda: first.is_called)
    first.listen(1)
    _until(lambda: first.is_called)  # of the round that follows
    first.listen(2)
    assert not first.is_called


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- states -------------------------------------------------------------------------------------


def test_states_for_two_who_ask(nodes: Nodes) -> None:
    """They get one that is newer than their question."""
    donor, *askers = nodes.enter(3)
    told: list[dict[str, Any]] = []
    threads = [
        threading.Thread(target=lambda n=n: told.append(n.ask(donor.me(), "u0"))) for n in askers
    ]
    assert not donor.is_asked()
    donor.offer(0, "state-0", {"state-0": 1})
    for thread in threads:
        thread.start()
    _until(donor.is_asked)
    _until(lambda: donor.store.has("call/1"))
    donor.offer(0, "state-0", {"state-0": 1})
    _until(donor.is_asked)  # it is not what they have asked for
    assert not told
    donor.offer(1, "state-1", {"state-1": 5})
    for thread in threads:
        thread.join(5)
    expected = {"name": donor.me().name, "round": 1, "path": "state-1", "files": {"state-1": 5}}
    assert told == [expected] * 2


def test_donors_that_die(nodes: Nodes) -> None:
    donor, asker = nodes.enter(2)
    nodes.kill(donor)
    assert asker.ask(donor.me(), "u0") is None
    nodes.kill(donor, None)
    asker._wait, began = 0.4, time.monotonic()
    assert asker.ask(donor.me(), "u0") is None
    assert time.monotonic() - began > 0.4
    donor.offer(1, "state-1", {})  # of the process before, in the same seat
    other = Member(donor.seat, "another")
    assert asker.ask(other, "u0") is None


# --- the meeting point --------------------------------------------------------------------------


def test_a_meeting_point_that_ends(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    others = {*threading.enumerate()}  # of other tests
    (first,) = nodes.enter(1)
    first.listen(0)
    port = nodes.store.port
    del nodes.store
    first.store.patience = first._ear.patience = 0.3
    with pytest.raises(RuntimeError, match=rf"{port} has not answered for 0.3 s.*lq-lightning me"):
        first.latest()
    with pytest.raises(RuntimeError, match="has not answered"):
        _until(lambda: first.is_called)
    nodes.store = keep_meeting_point(port)
    assert first.latest() is None  # it has connected again
    with pytest.raises(RuntimeError, match="was started again, and knows nothing"):
        first.gather(1, 0, 0)
    del nodes.store
    began = time.monotonic()
    first.store.patience = 60
    first.leave()
    assert time.monotonic() - began < 15
    assert {*threading.enumerate()} <= others  # one in the store would abort a process that ends


def _relay(port: int, silent: threading.Event) -> int:
    """A port that leads to another one, as a network does that may go silent."""
    server = socket.create_server(("127.0.0.1", 0))

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if not silent.is_set():
                    target.sendall(data)

    def serve() -> None:
        while True:
            near, far = server.accept()[0], socket.create_connection(("127.0.0.1", port))
            for pair in ((near, far), (far, near)):
                threading.Thread(target=pass_on, args=pair, name="relay", daemon=True).start()

    threading.Thread(target=serve, name="relay", daemon=True).start()
    return int(server.getsockname()[1])


def test_a_connection_that_goes_silent(nodes: Nodes) -> None:
    """No thread stays inside the store, where it would abort a process that ends."""
    silent, others = threading.Event(), {*threading.enumerate()}
    nodes.address = f"127.0.0.1:{_relay(nodes.store.port, silent)}"
    (node,) = nodes.enter(1)
    node.listen(0)
    silent.set()
    node.store.patience = 0.1
    ended: list[str] = []

    def end() -> None:
        with pytest.raises(RuntimeError, match=r"not answered for 0.1 s: Socket Timeout"):
            node.latest()
        node.leave()
        ended.append("here")

    thread = threading.Thread(target=end, daemon=True)
    thread.start()
    thread.join(30)
    assert ended
    assert {t.name for t in {*threading.enumerate()} - others} == {"relay"}


def test_operations_of_the_store(nodes: Nodes) -> None:
    store = PatientStore(nodes.address, 5)
    assert store.read("x") is None
    assert not store.has("x")
    assert store.propose("x", "1") == "1"
    assert store.propose("x", "2") == "1"
    assert store.propose("x", "2", "1") == "2"
    store.write("x", "3")
    assert store.read("x") == "3"
    store.add_to("list", "a")
    store.add_to("list", "b")
    store.add_to("list", "a")
    assert store.list("list") == {"a", "b"}
    assert store.list("none") == set()
    store.remove("x")
    store.remove("x")
    assert store.read("x") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node-1", ("node-1", 29400)),
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("[::1]:80", ("::1", 80)),
    ],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert split_address(text) == expected


@pytest.mark.parametrize("text", ["", ":80", "host:", "host:0", "host:65536", "host:x"])
def test_wrong_addresses(text: str) -> None:
    with pytest.raises(ValueError, match=r"give the host and port of `lq-lightning meet`"):
        split_address(text)
