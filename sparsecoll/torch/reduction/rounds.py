"""ElasticGroup: workers that come and go. They meet in a store of torch.distributed, and no one waits for the dead."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from sparsecoll.errors import CommunicationError, check_integer, check_number
from sparsecoll.formats import Buffer

PIECE = 4 << 20  # bytes of a value in the store; a TCPStore closes the connection if it gets more than 8 MiB
MOST_PAUSE = 0.05  # seconds between two looks at a round
MISSING = "\0none"  # no value in the store is this
START = "0/"  # the number of the first round, and what is before the keys of rounds


class Missed(CommunicationError):
    """What a round has left is no longer in the store, because this worker is far behind, or others have begun anew.

    Attributes:
        included: whether the round has this worker's message.
    """

    included = False


class Contribution(NamedTuple):
    """What one worker has sent in a round."""

    worker: str
    weight: float
    message: Buffer


class _Store:
    """A store, whose errors name it."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def named(*given: Any) -> Any:
            try:
                return call(*given)
            except dist.DistNetworkError as error:
                raise CommunicationError(f"store of the ElasticGroup: {name}: {error}") from error

        return named


def number_of(place: str) -> int:
    """Return the number of rounds that a state, or the first one, is of."""
    return int(place.partition("/")[0])


class ElasticGroup:
    """The `comm` of a LocalOptimizer whose workers may leave, die, return or join at any time.

        store = torch.distributed.TCPStore(host, port, is_master=is_first)  # outlives all workers, or the job ends
        optimizer = DiLoCo(inner, model, ElasticGroup(store, deadline=60), preset="sparseloco")

    A mean is a round: every worker writes its message to the store, and the round closes as soon as all workers of the
    round before (and those that have joined since) have written theirs, or when a worker has waited for `deadline`
    seconds. The mean is over the messages that were there, by weight. A worker that comes too late takes the mean of
    the others and keeps its own changes for the next round. One that starts, or was away for long, begins with the
    shared parameters and the state of the outer optimizer; one that starts takes another worker's state of the inner
    one after its first rounds. Buffers stay each worker's own. Each worker gets the
    messages of all others from the store, whose host needs the bandwidth.

    Args:
        store: store of torch.distributed that all workers reach, such as a TCPStore.
        deadline: seconds after which a worker no longer waits for others in a round (default: 60). A worker whose steps
            take longer than this beyond the others' is always late: give it a smaller `every`, and weights.
        workers: number of workers for which the first round waits, up to the deadline (default: 1).
        name: of this worker, unique (default: host, process and a random number).

    Attributes:
        options: of the outer optimizers in the last round, those of the worker that closed it.
        contributors: names of the workers in the last mean that this one has read, the same on all that have.
        number: of rounds in this worker's shared parameters, those before it joined included, for schedules and the end
            of the training; each fragment's mean is a round.
    """

    def __init__(self, store: Any, *, deadline: float = 60.0, workers: int = 1, name: str | None = None) -> None:
        if not all(callable(getattr(store, call, None)) for call in ("compare_set", "add", "check", "wait")):
            raise TypeError(f"store: expected one of torch.distributed, such as a TCPStore, got {type(store).__name__}")
        check_integer("workers", workers, 1)
        self.deadline, self.workers = check_number("deadline", deadline, "(0, 1e9)", " seconds"), workers
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.contributors: list[str] = []
        self.options: Any = None
        self.number, self._store = 0, _Store(store)
        self._token = uuid.uuid4().hex  # of this object, whatever its name
        self.in_use = False  # whether an optimizer has this object
        self._start, self.last = START, ""  # and the key of its last message
        self._waits: dict[int, int] = {}  # bytes of the rounds since the newest state

    # -- rounds

    def _of(self, number: int, what: str) -> str:
        """Return the key of something of a round; those since another start have others."""
        return f"{self._start.partition('/')[2]}{number}/{what}"

    def is_closed(self, number: int) -> bool:
        """Return whether a round is over."""
        return bool(self._store.check([self._of(number, "closed")]))

    def mark(self, number: int) -> None:
        """Tell the workers of round `number` + 1 to wait for this one."""
        self._store.set(self._of(number, f"name/{self._place(number)}"), self.name)

    def _place(self, number: int) -> int:
        return int(self._store.add(self._of(number, "places"), 1)) - 1

    def _present(self, number: int) -> dict[int, str]:
        """Return the workers in a round by their places, those that came late, too."""
        count = int(self._store.add(self._of(number, "places"), 0))
        names = {place: self._get(self._of(number, f"name/{place}")) for place in range(count)}
        return {place: name.decode() for place, name in names.items() if name is not None}

    def exchange(self, number: int, weight: float, message: Buffer, options: Any) -> tuple[list[Contribution], bool]:
        """Write this worker's message, wait until the round closes, and return all, and whether its own is among them.

        Args:
            number: of the round.
            weight: of this worker.
            message: of this worker.
            options: for `options`, if this worker closes the round.

        Raises:
            Missed: The messages are no longer in the store, or others have begun anew.
            CommunicationError: Another worker has the same name.
        """
        self._check_start()
        self._store.delete_key(f"left/{self.name}")  # which has come back after join()
        if not self.is_closed(number):
            self._contribute(number, weight, message, options)
        closed = json.loads(self._store.get(self._of(number, "closed")))[0]  # perhaps since an interrupted call
        included = any(self._of(number, f"message/{place}") == self.last for place, _ in closed)
        try:
            return self.read(number), included
        except Missed as error:
            error.included = included
            raise

    def _contribute(self, number: int, weight: float, message: Buffer, options: Any) -> None:
        """Write this worker's message, and wait until the round closes."""
        if (self._get(f"token/{self.name}") or b"").decode() != self._token:
            raise CommunicationError(f"name: expected a name of its own for each worker, got {self.name!r} for several")
        place = self._place(number)
        self.last = self._of(number, f"message/{place}")
        self._write(self.last, np.array([weight]).tobytes() + bytes(message))
        self._store.set(self._of(number, f"name/{place}"), self.name)
        ends, pause = time.monotonic() + self.deadline, 0.001
        try:
            while not self.is_closed(number):
                here = self._present(number)
                if self._is_complete(number, here) or time.monotonic() > ends:
                    self._store.compare_set(self._of(number, "closed"), "", json.dumps([sorted(here.items()), options]))
                self._check_start()
                time.sleep(pause)
                pause = min(1.5 * pause, MOST_PAUSE)
        except BaseException:  # an interrupt: this worker may come again
            self._store.delete_key(self._of(number, f"name/{place}"))
            raise

    def has_sent(self, number: int) -> bool:
        """Return whether this worker's last message is of this round."""
        return self.last.startswith(self._of(number, "message/"))

    def _newest_start(self) -> str:
        return (self._get("start") or START.encode()).decode()

    def _check_start(self) -> None:
        if self._newest_start() != self._start:
            raise Missed("store: expected the rounds since this worker began, got a loaded state, with which all begin")

    def _is_complete(self, number: int, here: Mapping[int, str]) -> bool:
        """Return whether all have come that are waited for."""
        missing = {*self._present(number - 1).values()} - {*here.values()}
        return (self.is_closed(number - 1) or len(here) >= self.workers) and all(
            self._store.check([f"left/{name}"]) for name in missing
        )

    def leave(self) -> None:
        """Tell the others not to wait for this worker in later rounds."""
        self._store.set(f"left/{self.name}", "")

    def read(self, number: int) -> list[Contribution]:
        """Return the contributions to a closed round, in the same order on all workers.

        Raises:
            Missed: They are no longer in the store.
        """
        found = []
        workers, self.options = json.loads(self._store.get(self._of(number, "closed")))
        self.contributors = [worker for _, worker in workers]
        for place, worker in workers:
            data = self._read(self._of(number, f"message/{place}"))
            found.append(Contribution(worker, float(data[:8].view(np.float64)[0]), data[8:]))
        if self.name not in self.contributors:
            self.mark(number)
        self._waits[number] = sum(one.message.nbytes for one in found)
        return found

    # -- the shared state

    def enter(self, signature: str) -> bytes | None:
        """Begin; return the newest state, of which `number` rounds are a part, or None if this is the first worker.

        Raises:
            ValueError: The others have other options or parameters, or another optimizer has this object.
            CommunicationError: Their state does not come within the deadline.
        """
        if self.in_use:
            raise ValueError(
                "comm: expected an ElasticGroup for each optimizer, got one for two: close() the first, or make another"
                " group, on a PrefixStore of its own"
            )
        theirs = self._store.compare_set("signature", "", signature).decode()
        if theirs != signature:
            others, own = json.loads(theirs), json.loads(signature)
            key = next(key for key in {**others, **own} if others.get(key) != own.get(key))
            other, own = (options.get(key, "nothing") for options in (others, own))
            raise ValueError(f"{key}: expected {other}, as the other workers have, got {own}")
        self._store.delete_key(f"left/{self.name}")
        self._store.set(f"token/{self.name}", self._token)
        first = self._store.compare_set("first", "", self.name).decode()
        while first != self.name or self._store.check(["state"]):  # it may have had this name before
            pieces = self._pieces(first)
            try:
                return self.newest()
            except CommunicationError:  # if the first worker has died before its state was there, one takes its place
                if self._get("state") is not None:
                    return self.newest()
                if self._pieces(first) == pieces:  # it is not writing them
                    first = self._store.compare_set("first", first, self.name).decode()
        self.mark(-1)
        return None

    def newest(self) -> bytes:
        """Return the newest state in the store, and set `number`; the rounds since are still in the store."""
        ends = time.monotonic() + self.deadline
        while True:
            with contextlib.suppress(RuntimeError, Missed):  # it was replaced meanwhile
                self._store.wait(["state"], datetime.timedelta(seconds=self.deadline))
                self._start = self._newest_start()
                place = self._store.get("state").decode()
                state, self.number = self._read(f"state/{place}"), number_of(place)
                self.mark(self.number - 1)
                return state.tobytes()
            if time.monotonic() > ends:
                raise CommunicationError(f"store: expected the state of the others within {self.deadline} s, got none")

    def _pieces(self, first: str) -> int:
        """Return how much of the first state is in the store."""
        return next(i for i in itertools.count() if not self._store.check([f"state/0/{first}.{i}"]))

    def publish(self, number: int, state: Callable[[], bytes], size: int) -> None:
        """After round `number` - 1: let one worker write a new state, if the rounds since the last one are larger."""
        if full := sum([*self._waits.values()]) > size:
            self._waits.clear()
        if number and not (full and self.contributors[:1] == [self.name]):
            return
        place, known = f"{number}/{self.name}", (self._get("state") or b"").decode()
        if number and known and number <= number_of(known):  # this worker is slow
            return
        before = known or place
        kept = (self._get("kept") or before.encode()).decode()  # nothing if a worker has died before it was set
        self._write(f"state/{place}", state())
        if number == 0 and (first := (self._get("first") or b"").decode()) != self.name:
            raise CommunicationError(
                f"store: expected the first state within {self.deadline} s, got it later: {first} has begun in place"
                f" of {self.name}, which may join with a new optimizer"
            )
        if self._store.compare_set("state", known, place).decode() != place:  # others have written newer ones meanwhile
            return self._delete(f"state/{place}")
        self._store.set("kept", before)  # a state, and the rounds since, stay while the next one is the newest
        if kept != before:
            self._delete(f"state/{kept}")
        for old in range(number_of(kept), number_of(before)):
            for i in self._present(old):
                self._delete(self._of(old, f"message/{i}"))
                self._store.delete_key(self._of(old, f"name/{i}"))

    def restart(self, number: int, state: Callable[[], bytes]) -> bool:
        """Let all begin with a loaded state, of `number` rounds, unless a round is over, or they have such a state.

        Returns:
            Whether they do; the others notice it in their next round.
        """
        self._start = self._newest_start()
        first = number_of(self._start)
        if number < first or self.is_closed(first) or (number == first and self._start != START):
            return False
        lock, holder = f"{self._start}lock", ""  # of those who would, one does; another if that one has died
        while (found := self._store.compare_set(lock, holder, self._token).decode()) != self._token:
            holder, ends = found, time.monotonic() + self.deadline
            while self._newest_start() == self._start and time.monotonic() < ends:
                time.sleep(MOST_PAUSE)
            if self._newest_start() != self._start:
                return False
        self._start, self.number, before = f"{number}/{self._token}/", number, self._store.get("state").decode()
        place = self._start[:-1]
        self._write(f"state/{place}", state())
        for key in ("kept", "state"):
            self._store.set(key, place)
        self._store.set("start", self._start)
        self._delete(f"state/{before}")
        self.mark(number - 1)
        return True

    def lend(self, number: int, state: Callable[[], bytes]) -> None:
        """After round `number` - 1: let one worker write its own state, if others ask for one."""
        asks = json.loads(self._get("asks") or b"[]")
        if asks and [worker for worker in self.contributors if worker not in asks][:1] == [self.name]:
            self._store.delete_key("asks")
            before = self._get("own")
            self._write(f"own/{number}", state())
            self._store.set("own", str(number))
            if before:
                self._delete(f"own/{before.decode()}")

    def borrow(self, since: int) -> bytes | None:
        """Return the state that a worker has lent after round `since`; if there is none, None, and ask for it."""
        number = int(self._get("own") or 0)
        if number > since:
            with contextlib.suppress(Missed):  # it was replaced meanwhile
                return self._read(f"own/{number}").tobytes()
        asks = json.loads(self._get("asks") or b"[]")  # what another worker adds meanwhile, it adds again
        self._store.set("asks", json.dumps(sorted({*asks, self.name})))
        return None

    # -- values

    def _get(self, key: str) -> bytes | None:
        """Return a value, or None: `get` would wait for one that another worker has removed."""
        found: bytes = self._store.compare_set(key, MISSING, MISSING)
        return None if found == MISSING.encode() else found

    def _write(self, key: str, data: bytes) -> None:
        count = -(-len(data) // PIECE)
        for i in range(count):
            self._store.set(f"{key}.{i}", data[i * PIECE : (i + 1) * PIECE])
        self._store.set(key, str(count))

    def _read(self, key: str) -> NDArray[np.uint8]:
        count = int(self._get(key) or 0)
        pieces = [piece for i in range(count) if (piece := self._get(f"{key}.{i}")) is not None]
        if not pieces or len(pieces) < count:
            raise Missed(f"store: expected {key}, got none: it was removed")
        return np.frombuffer(b"".join(pieces), np.uint8)

    def _delete(self, key: str) -> None:
        for i in range(int(self._get(key) or 0)):
            self._store.delete_key(f"{key}.{i}")
        self._store.delete_key(key)
