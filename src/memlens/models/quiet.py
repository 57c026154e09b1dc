"""Keeps transformers' reports and progress bars off the screen for the length of a call, then restores all."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_transformers() -> Iterator[None]:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    verbosity, bars, hub_bars = (
        logging.get_verbosity(),
        logging.is_progress_bar_enabled(),
        not are_progress_bars_disabled(),
    )
    # disable_progress_bar() of transformers silences the Hub's bars too; a download's bar is wanted on a terminal
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    if sys.stderr.isatty() and hub_bars:
        enable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
        if hub_bars:
            enable_progress_bars()
        else:
            disable_progress_bars()
