"""What becomes of a command: its exit code, and the one line on stderr where it did not go well.

    0 done    2 wrong input    130 interrupted    1 a bug, the only case that shows a traceback

This module knows no verb.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

from memlens.cli.text import visible
from memlens.errors import MemlensError

DONE, BUG, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130


def say(message: str) -> None:
    """One line to stderr, whatever the message holds."""
    with suppress(BrokenPipeError):
        print(f"memlens: {visible(message)}", file=sys.stderr, flush=True)


def interrupted(advice: str = "") -> int:
    say(advice or "interrupted; run the same command again to continue")
    return INTERRUPTED


def guarded(verb: Callable[..., None]) -> Callable[..., int]:
    """The verb as a function that gives an exit code and raises nothing."""

    @wraps(verb)
    def run(*arguments: Any, **named: Any) -> int:
        try:
            verb(*arguments, **named)
            sys.stdout.flush()
        except MemlensError as error:
            say(str(error))
            return WRONG_INPUT
        except KeyboardInterrupt as error:
            return interrupted(str(error))
        except BrokenPipeError:
            _drop_output()
        except OSError as error:
            say(_about_file(error))
            return WRONG_INPUT
        except MemoryError:
            say("there is not enough memory for this; try a smaller --top, --batch-tokens or --unit")
            return WRONG_INPUT
        except Exception:  # the last stop: whatever arrives here is ours to mend
            traceback.print_exc()
            say("this is a bug in memlens, not in your input; please report it with the lines above")
            return BUG
        return DONE

    return run


def _about_file(error: OSError) -> str:
    """What the system says about a path, for the cases that no part of memlens explains better."""
    where = str(error.filename or "a file")
    shown = where if len(where) < 200 else where[:100] + "..."
    return f"{shown}: {error.strerror or error}; check the path, its permissions and the space on the disk"


def _drop_output() -> None:
    """The reader (`| head`) has enough: what is still buffered must not fail when Python ends."""
    with suppress(OSError, ValueError):  # a replaced stdout may have no file behind it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
