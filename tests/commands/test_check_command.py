"""The command `check` on two ends of this host's loopback, which pass for two hosts."""

import argparse
import threading
from contextlib import closing
from typing import Any

import pytest

from distributed.harness import free_port
from lightning_dct.commands import main
from lightning_dct.config import UsageError
from lightning_dct.failures import check


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[check.Report]:
    """What both ends have found out."""
    names = threading.local()
    monkeypatch.setattr(check, "machine", lambda: names.own)
    monkeypatch.setattr(check, "data_address", lambda *_: ("127.0.0.1", ""))
    monkeypatch.setattr(check, "ENOUGH_S", 0.0)  # after the first bytes
    monkeypatch.setattr("lightning_dct.failures.hosts.is_loopback", lambda _: False)
    port = free_port()
    found = []

    def listen() -> None:
        names.own = "one"
        found.append(check.listen(port))

    thread = threading.Thread(target=listen)
    thread.start()
    names.own = "other"
    while True:
        try:
            found.append(check.call("localhost", port))
            break
        except UsageError:  # it does not listen yet
            continue
    thread.join()
    return found


def test_both_ends_print_the_same_table(reports: list[check.Report]) -> None:
    """Oracle: the other end, and what each knows of itself."""
    one, other = map(check.describe, reports)
    assert one == other
    assert "can start." in one
    assert one.count("open") == 2
    assert all(rate > 0 for rate in reports[0].rates)


@pytest.mark.parametrize("words", [[], ["--listen", "10.0.0.1"]])
def test_one_end_listens_and_the_other_calls(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *words]) == 1
    assert "check --listen` on one host" in capsys.readouterr().err


def test_a_port_that_is_taken_or_silent_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with closing(check.sockets.listen(0)) as listener:
        port = listener.getsockname()[1]
        assert main(["check", "--listen", "--port", str(port)]) == 1
        assert f"ss -ltnp | grep {port}" in capsys.readouterr().err
    assert main(["check", "127.0.0.1", "--port", str(port)]) == 1
    assert "nothing listens at this port" in capsys.readouterr().err


def test_a_host_that_speaks_otherwise_ends_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the remedy, for what another version may say."""

    def says_nothing_known(*_: Any) -> Any:
        raise KeyError("versions")

    monkeypatch.setattr(check, "_checked", says_nothing_known)
    with pytest.raises(UsageError, match="same version of lightning_dct"):
        check._check(argparse.Namespace(), 0, "127.0.0.1")  # type: ignore[arg-type]
