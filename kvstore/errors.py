"""What keeps the daemon from starting. Errors that travel to clients are in `kvstored.v1.errors`.

    StartupError         the machine or another process is in the way: another start may succeed. Status 1
    +-- ConfigError      a setting is, or a file or group that one names: key, value, source and what is
                         allowed are in the message. Each start fails until somebody changes something. Status 2

Both are printed without a traceback, so each message says what to do next. The status is
what a supervisor goes by (RestartPreventExitStatus= in systemd/kvstored.service): nothing
that may pass by itself has status 2.
"""


class StartupError(Exception):
    """The daemon cannot start as things are; the message names the obstacle and what to do about it."""

    exit_status = 1


class ConfigError(StartupError):
    """One or more settings are wrong. `problems` has one line for each, all that were found."""

    exit_status = 2

    def __init__(self, *problems: str) -> None:
        assert problems, "an error without a problem says nothing"
        self.problems = problems
        if len(problems) == 1:
            super().__init__(problems[0])
        else:
            lines = "".join(f"\n  - {problem}" for problem in problems)
            super().__init__(f"{len(problems)} problems in the configuration:{lines}")
