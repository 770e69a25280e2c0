"""Role of a box: run a script as `__main__`, with its standard streams and nothing else."""

from __future__ import annotations

import builtins
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NAME = "program.py"


def main(message: dict[str, Any], pipes: list[int], control: int) -> None:
    module = type(sys)("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    sys.argv = [NAME]
    try:
        exec(compile(message["code"], NAME, "exec"), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        show(error, message["code"])
        sys.exit(1)


def show(error: BaseException, code: str) -> None:
    """The traceback as a script of its own would have printed it, without this file's frame."""
    import linecache
    import traceback

    linecache.cache[NAME] = (len(code), None, code.splitlines(keepends=True), NAME)
    sys.stdout.flush()
    traceback.print_exception(
        type(error), error, error.__traceback__ and error.__traceback__.tb_next
    )
