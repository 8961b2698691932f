"""How a rank waits for messages over MPI."""

import importlib
import os
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from sparsecoll.transport import LocalTransport
from sparsecoll.transport.progress import in_background


def waiter(timeout=None, **options):
    try:
        from sparsecoll.transport.mpi.waiting import Waiter
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"needs MPI: {error}")
    return Waiter(SimpleNamespace(rank=0, Abort=print), str, timeout, **options)


@pytest.mark.parametrize("one_node", [False, True])
@pytest.mark.parametrize("overlapped", [False, True])
def test_a_rank_that_computes_meanwhile_sleeps_at_once_between_machines(overlapped, one_node):
    slept = waiter(one_node=one_node, overlapped=overlapped).pause(lambda: False)
    assert slept == (overlapped and not one_node)


LONG = 60.0  # seconds; a test that sleeps so long fails


@pytest.fixture
def pair():
    """Two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far = server.accept()[0]
    with near, far:
        yield near, far


@pytest.fixture
def connections(pair, monkeypatch):
    """The near end, as the one connection of this process."""
    waiter()
    module = importlib.import_module("sparsecoll.transport.mpi.connections")
    names = [str(pair[0].fileno()), "0", str(os.dup(1))]  # not connections
    monkeypatch.setattr(module.os, "listdir", lambda _: names)
    yield module.Connections()
    os.close(int(names[2]))


def slept(connections, seconds, **options):
    start = time.monotonic()
    connections.sleep(seconds, **options)
    return time.monotonic() - start


def test_what_comes_ends_a_sleep_and_is_known_to_have_announced_the_message(connections, pair):
    assert slept(connections, 0.02) >= 0.02
    connections.came()
    assert not connections.announcing
    timer = threading.Timer(0.05, lambda: pair[1].send(b"1"))
    timer.start()
    assert slept(connections, LONG) < LONG / 2
    timer.join()
    connections.came()
    assert connections.announcing and pair[0].recv(9) == b"1"
    assert slept(connections, 0.02) >= 0.02
    connections.came()
    assert not connections.announcing


def test_room_to_send_ends_a_sleep_of_a_rank_that_sends(connections, pair):
    near, far = pair
    near.setblocking(False)
    assert slept(connections, 0.02, moving=True) >= 0.02  # there is room: nothing to wait for
    while True:
        try:
            near.send(bytes(1 << 20))
        except BlockingIOError:
            break
    assert slept(connections, 0.02) >= 0.02
    reader = threading.Timer(0.05, lambda: [far.recv(1 << 20) for _ in range(8)])
    reader.start()
    assert slept(connections, LONG, moving=True) < LONG / 2
    near.close()  # the reader finds the end
    reader.join()


def test_bytes_that_nobody_reads_do_not_keep_a_rank_awake(connections, pair, monkeypatch):
    module = importlib.import_module("sparsecoll.transport.mpi.connections")
    monkeypatch.setattr(module, "INSTANT", LONG)  # however slow this machine is
    monkeypatch.setattr(module, "SCAN_SECONDS", 1e9)
    pair[1].send(b"1")
    slept(connections, 0.01)
    connections.came()
    assert connections.announcing
    assert all(slept(connections, LONG, moving=True) < LONG / 2 for _ in range(60))  # bytes of a message on its way
    for _ in range(module.MOST_INSTANT):
        assert connections.announcing and slept(connections, LONG) < LONG / 2
    assert not connections.announcing and slept(connections, 0.01) >= 0.01


def test_connections_that_were_closed_are_forgotten(connections, pair):
    slept(connections, 0)
    pair[0].close()
    slept(connections, 0)
    assert slept(connections, 0.02, moving=True) >= 0.02


def test_a_short_sleep_ends_by_itself_and_looks_afterwards(connections, pair):
    pair[1].send(b"1")
    assert slept(connections, 1e-4) >= 1e-4
    connections.came()
    assert connections.announcing and pair[0].recv(9) == b"1"
    slept(connections, 1e-4)
    connections.came()
    assert not connections.announcing


def test_sockets_stay_as_they_are(connections, pair):
    for timeout in (None, 5.0):
        socket.setdefaulttimeout(timeout)
        try:
            slept(type(connections)(), 0.001)
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(pair[0].fileno()) and pair[0].fileno() >= 0


def test_a_system_that_does_not_list_connections(monkeypatch):
    waiter()
    module = importlib.import_module("sparsecoll.transport.mpi.connections")
    monkeypatch.setattr(module, "DIRECTORY", "/nowhere")
    assert slept(module.Connections(), 0.02, moving=True) >= 0.02


@pytest.mark.parametrize("announcing", [False, True])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("moving", [False, True])
def test_sleeps_are_longer_where_messages_end_them_and_all_come_from_elsewhere(announcing, alone, moving):
    calls = []
    connections = SimpleNamespace(announcing=announcing, sleep=lambda *options: calls.append(options))
    options = {"one_node": False, "overlapped": True, "connections": connections, "alone": alone}
    assert waiter(**options).pause(lambda: moving)
    if moving:
        assert calls == ([(pytest.approx(2e-3), True)] if announcing and alone else [])
    else:
        assert calls == [(pytest.approx(10e-3 if announcing and alone else 50e-6), False)]
    calls.clear()
    assert waiter(**options | {"one_node": True}, expected=1.0).pause(lambda: moving) == (not moving) and not calls


@pytest.mark.parametrize(
    "expected, timeout, limit", [(0.0, None, 0.01), (0.02, None, 0.04), (60.0, None, 0.05), (60.0, 0.03, 0.03)]
)
def test_a_sleep_that_a_message_ends_lasts_about_as_long_as_waits_do(expected, timeout, limit):
    calls = []
    connections = SimpleNamespace(announcing=True, sleep=lambda seconds, moving: calls.append(seconds))
    options = {"one_node": False, "overlapped": True, "connections": connections, "alone": True}
    assert waiter(timeout, expected=expected, **options).pause(lambda: False)
    assert calls == [pytest.approx(limit, rel=0.2)]


def test_nonblocking_calls_are_overlapped_and_blocking_ones_are_not():
    transport = LocalTransport()

    def failing():
        assert transport.overlapped
        raise ValueError

    assert in_background(transport, lambda: transport.overlapped).result()
    assert not transport.worker.in_order(lambda: transport.overlapped)
    with pytest.raises(ValueError):
        in_background(transport, failing).result()
    assert not transport.worker.in_order(lambda: transport.overlapped)
    transport.worker.close()
