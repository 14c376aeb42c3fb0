"""What the peers of a rank are told of the exception that ended it."""

from __future__ import annotations

import os

__all__ = ["reason_of"]

PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
LONGEST_TEXT_NBYTES = 600  # of an exception


def reason_of(error: BaseException) -> str:
    """What peers are told of an exception: its type, its text, and the line that raised it."""
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be had)"
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    # Without what C strings and UTF-8 cannot hold; cut, so that there is room for the place.
    whole = said.replace("\0", "\\0").encode(errors="backslashreplace")
    if len(whole) > LONGEST_TEXT_NBYTES:
        whole = whole[:LONGEST_TEXT_NBYTES] + b"..."
    said = whole.decode(errors="ignore")
    place = ""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not place or not code.co_filename.startswith(PACKAGE):
            place = f" (at {code.co_filename}:{trace.tb_lineno} in {code.co_name})"
        trace = trace.tb_next
    return said + place.encode(errors="backslashreplace").decode()
