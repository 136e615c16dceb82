"""Silence the model libraries, and shorten their errors."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

_NOISY = (
    "bitsandbytes",
    "huggingface_hub",
    "peft",
    "transformers.modeling_utils",
    "transformers.distributed",
    "transformers.utils.loading_report",
)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep the libraries' progress bars, hints and import-time warnings off the terminal; errors are still raised."""
    loggers = [logging.getLogger(name) for name in _NOISY]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to", category=UserWarning)
        from transformers.utils import logging as hf

        had_bars = hf.is_progress_bar_enabled()
        hf.disable_progress_bar()
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
            if had_bars:
                hf.enable_progress_bar()


def first_line(error: Exception) -> str:
    """Return the first line of an error's text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
