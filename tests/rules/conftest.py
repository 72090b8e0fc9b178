"""Fixtures of the tests of the five rules about shared memory."""

from collections.abc import Callable, Iterator

import pytest

from tests.rules.processes import Program


@pytest.fixture
def start_program() -> Iterator[Callable[..., Program]]:
    """Starts client programs: `start_program(TEXT, argument, ...)`; all are gone after the test."""
    running: list[Program] = []

    def start(text: str, *arguments: object) -> Program:
        running.append(Program(text, *arguments))
        return running[-1]

    yield start
    for program in running:
        program.kill()
