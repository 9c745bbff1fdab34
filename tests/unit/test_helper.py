"""The second thread: what it is given is done once, by it or by its owner, and never after its owner has gone on."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from storage.helper import Helper

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def helper() -> Iterator[Helper]:
    helper = Helper("test-helper")
    yield helper
    helper.close()


def test_both_returns_what_was_done_beside(helper: Helper) -> None:
    done: list[str] = []
    assert helper.both(lambda: done.append("here"), lambda: 7) == 7
    assert done == ["here"]


def test_work_is_done_in_another_thread_while_its_owner_waits(helper: Helper) -> None:
    began = threading.Event()

    def beside() -> int:
        began.set()
        return threading.get_ident()

    assert helper.both(lambda: began.wait(), beside) != threading.get_ident()


def test_owner_does_the_work_when_the_helper_is_busy(helper: Helper) -> None:
    go_on = threading.Event()
    busy = helper.begin(lambda: go_on.wait())
    assert helper.begin(threading.get_ident).finish() == threading.get_ident()
    go_on.set()
    assert busy.finish()


def test_an_error_beside_is_raised_after_both_ended(helper: Helper) -> None:
    done: list[str] = []

    def fail() -> None:
        raise ValueError("beside")

    with pytest.raises(ValueError, match="beside"):
        helper.both(lambda: done.append("here"), fail)
    assert done == ["here"]


def test_an_error_here_waits_for_what_runs_beside(helper: Helper) -> None:
    began, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def beside() -> None:
        began.set()
        go_on.wait()
        ended.set()
        raise ValueError("dropped")

    def here() -> None:
        began.wait()
        threading.Timer(0.05, go_on.set).start()
        raise OSError("here")

    with pytest.raises(OSError, match="here"):
        helper.both(here, beside)
    assert ended.is_set()


def test_abandoned_work_that_has_not_begun_never_does(helper: Helper) -> None:
    go_on = threading.Event()
    busy = helper.begin(lambda: go_on.wait())
    done: list[str] = []
    helper.begin(lambda: done.append("late")).abandon()
    go_on.set()
    busy.finish()
    helper.close()
    assert done == []
