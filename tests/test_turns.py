"""A lock whose waiters are served in order, and that an interrupted waiter does not break."""

from __future__ import annotations

import threading
import time

import pytest

from tutorial_lib.turns import Turns


def test_waiters_are_served_in_the_order_of_their_coming():
    turns, served, threads = Turns(), [], []

    def wait(number: int) -> None:
        with turns:
            served.append(number)

    with turns:
        assert not turns.try_enter()
        for number in range(6):
            threads.append(threading.Thread(target=wait, args=(number,)))
            threads[-1].start()
            while len(turns._line) <= number:
                time.sleep(0.001)
    for thread in threads:
        thread.join(10)
    assert served == list(range(6))
    assert turns.try_enter() and not turns.try_enter()
    turns.__exit__()
    assert turns.try_enter()


def test_a_busy_thread_does_not_starve_another():
    turns, progress, is_over = Turns(), [], threading.Event()

    def busy() -> None:
        while not is_over.is_set():
            with turns:
                time.sleep(0.001)

    thread = threading.Thread(target=busy)
    thread.start()
    for _ in range(20):
        start = time.perf_counter()
        with turns:
            progress.append(time.perf_counter() - start)
    is_over.set()
    thread.join(10)
    assert len(progress) == 20 and not turns._line


@pytest.mark.parametrize("is_called", [False, True], ids=["still in line", "already called"])
def test_an_interrupted_waiter_passes_its_turn_on(is_called, monkeypatch):
    turns = Turns()
    turns.__enter__()

    class Interrupted:
        def __init__(self) -> None:
            self.calls = 0

        def acquire(self, *_) -> bool:
            self.calls += 1
            if self.calls == 2:
                if is_called:
                    turns.__exit__()
                raise KeyboardInterrupt
            return True

        def release(self) -> None: ...

    with monkeypatch.context() as patch:
        patch.setattr(threading, "Lock", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            turns.__enter__()
    assert not turns._line
    if not is_called:
        turns.__exit__()
    assert turns.try_enter()
