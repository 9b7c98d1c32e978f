"""Prints of the user's code and logs of torch are shown once."""

from __future__ import annotations

import io
import logging
import warnings

import pytest

from ckpttool.tracing.build_model import logs_as_warnings, prints_once


def test_a_line_is_printed_once_even_without_a_newline(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with prints_once():
            print("one of a test")
            print("two of", end=" a test")
    assert capsys.readouterr() == ("", "one of a test\ntwo of a test\n")


def test_logged_warnings_become_warnings_and_info_does_not() -> None:
    log, stream = logging.getLogger("torch.of_a_test"), io.StringIO()
    handler = logging.StreamHandler(stream)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        with warnings.catch_warnings(record=True) as caught, logs_as_warnings():
            warnings.simplefilter("always")
            log.info("information")
            log.warning("warning")
        log.warning("later")
    finally:
        log.removeHandler(handler)
    assert [str(one.message) for one in caught] == ["warning"]
    assert stream.getvalue() == "information\nlater\n"
