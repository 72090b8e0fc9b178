"""What keeps the daemon from starting. Errors that travel to clients are in `kvstored.v1.errors`.

    StartupError         the machine or another process is in the way
    +-- ConfigError      a setting is: its key, value, source and what is allowed are in the message

Both are printed without a traceback and end the program with status 2, so each message
says what to do next.
"""


class StartupError(Exception):
    """The daemon cannot start as things are; the message names the obstacle and what to do about it."""


class ConfigError(StartupError):
    """One or more settings are wrong. `problems` has one line for each, all that were found."""

    def __init__(self, *problems: str) -> None:
        assert problems, "an error without a problem says nothing"
        self.problems = problems
        if len(problems) == 1:
            super().__init__(problems[0])
        else:
            lines = "".join(f"\n  - {problem}" for problem in problems)
            super().__init__(f"{len(problems)} problems in the configuration:{lines}")
