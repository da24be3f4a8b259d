"""`lagrange up` with stand-ins: `fake_up.py CONFIG|--resume=FOLDER [--requeue] ROLE=BEHAVIOUR ...`."""

from __future__ import annotations

import sys
from pathlib import Path

from broker.errors import BrokerError
from configs import ConfigError
from services.local.layout import CannotStart, Role
from services.local.session import Settings
from services.local.supervision import RestartPolicy
from services.local.up import run

FAKE = Path(__file__).with_name("fake_process.py")


def main(arguments: list[str]) -> int:
    requeue = "--requeue" in arguments
    behaviours = dict(argument.split("=", 1) for argument in arguments[1:] if argument != "--requeue")

    def command(role: Role) -> list[str]:
        file = Path(role.command[role.command.index("--config") + 1])
        return [sys.executable, str(FAKE), role.name, str(file.parent), behaviours.get(role.name, "serve")]

    resume = arguments[0].removeprefix("--resume=") if arguments[0].startswith("--resume=") else None
    settings = Settings(RestartPolicy(tries=2, first_delay_s=0.05), poll_s=0.02, look_every_s=0.1, line_every_s=0.2)
    try:
        return run(
            None if resume else Path(arguments[0]),
            resume=Path(resume) if resume else None,
            requeue=requeue,
            commands=command,
            settings=settings,
        )
    except (ConfigError, CannotStart) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except BrokerError as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
