"""What the user's code prints and what torch logs, said once."""

from __future__ import annotations

import io
import logging
import warnings

import pytest

from ckpttool.tracing.user_code import logs_as_warnings, prints_once


def test_a_line_is_said_once_and_one_without_an_end_too(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with prints_once():
            print("one of a test")
            print("two of", end=" a test")
    assert capsys.readouterr() == ("", "one of a test\ntwo of a test\n")


def test_what_torch_warns_of_is_a_warning_and_what_it_tells_is_not() -> None:
    log, said = logging.getLogger("torch.of_a_test"), io.StringIO()
    handler = logging.StreamHandler(said)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        with warnings.catch_warnings(record=True) as warned, logs_as_warnings():
            warnings.simplefilter("always")
            log.info("told")
            log.warning("odd")
        log.warning("later")
    finally:
        log.removeHandler(handler)
    assert [str(one.message) for one in warned] == ["odd"]
    assert said.getvalue() == "told\nlater\n"
