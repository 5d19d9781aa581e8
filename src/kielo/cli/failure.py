"""The report of an unexpected exception: its traceback in a file, and a message that names the file."""

import os
import platform
import sys
import traceback
from datetime import UTC, datetime
from pathlib import Path
from tempfile import gettempdir

from kielo import __version__
from kielo.recipe.error_messages import first_line, rank_prefix


def report_unexpected(error: BaseException) -> str:
    """Write the traceback to a file, here or in the temporary folder; returns the message that names it."""
    text = "".join(traceback.format_exception(error))
    fault = f"{rank_prefix()}a fault of Kielo's own ({type(error).__name__}: {first_line(error)})"
    report = (
        f"kielo {__version__}, Python {platform.python_version()}, {platform.platform()}\n"
        f"{datetime.now(UTC).isoformat(timespec='seconds')}\n{' '.join(sys.argv)}\n\n{text}"
    )
    for folder in (Path.cwd, lambda: Path(gettempdir())):
        try:
            path = folder() / f"kielo-error-{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}.log"
            with open(path, "x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(report)
        except OSError:
            continue
        return f"{fault}; its traceback is in {path}: please report it with that file"
    return f"{fault}, and no traceback could be written; KIELO_TRACEBACK=1 shows it"
