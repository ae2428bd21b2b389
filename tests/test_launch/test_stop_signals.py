"""Signals: gently while lines are answered, at once elsewhere, and at once for the second one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch import stop_signals
from launch.stop_signals import Interrupted, StopSignals, signal_name

ROOT = Path(__file__).resolve().parents[2]


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_elsewhere_it_ends_what_runs(number: int) -> None:
    before = signal.getsignal(number)
    with StopSignals(speaks=False), pytest.raises(Interrupted) as caught:
        send(number)
    assert caught.value.number == number and str(caught.value) == signal.Signals(number).name
    assert signal.getsignal(number) == before


def test_gently_it_is_kept_and_said(capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignals() as stop, stop.gently():
        send(signal.SIGTERM)
        assert stop.wanted == signal.SIGTERM
    assert capfd.readouterr().err == "SIGTERM: stopping after the running step; a second one ends at once\n"


def test_what_torchrun_passes_on_is_the_same_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(stop_signals.time, "monotonic", lambda: now[0])
    with StopSignals(echoes=True, speaks=False) as stop, stop.gently():
        send(signal.SIGINT)
        now[0] += stop_signals.ECHO_S / 2
        send(signal.SIGTERM)
        assert stop.wanted == signal.SIGINT


def test_who_tells_a_fault_is_not_stopped_in_it(capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignals() as stop:
        with stop.ending():
            send(signal.SIGTERM)
        assert stop.wanted == signal.SIGTERM
    assert capfd.readouterr().err == ""


def test_a_second_one_ends_the_process_at_once() -> None:
    script = (
        "import os, signal\n"
        "from launch.stop_signals import StopSignals\n"
        "with StopSignals(speaks=False) as stop, stop.gently():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('still here', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('never', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "still here\n"), done.stderr


def test_names() -> None:
    assert signal_name(15) == "SIGTERM" and signal_name(200) == "signal 200"


def test_the_exit_code_of_a_process_that_ends_is_not_a_signal_s() -> None:
    """torchrun sends SIGTERM as soon as another rank has ended: between the last words and the end, too."""
    script = (
        "import os, signal, sys\n"
        "from launch.stop_signals import StopSignals\n"
        "with StopSignals(last=sys.argv[1] == 'last') as stop, stop.ending():\n"
        "    pass\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.exit(3)\n"
    )
    ended = [
        subprocess.run([sys.executable, "-c", script, each], cwd=ROOT, timeout=60).returncode for each in ("last", "no")
    ]
    assert ended == [3, -signal.SIGTERM]
