"""The error that users read, messages for others' errors (memory, disk, network, packages), and printing."""

import errno
import json
import os
import resource
import shutil
import sys
import textwrap
import traceback
from typing import TextIO


class KieloError(Exception):
    """An error that the user can fix. The message names the key, file, line or rank, and the fix.

    `kielo` prints the message without a traceback and exits 1.
    """


class Stopped(KieloError):
    """Training stopped on purpose. The later stages have to wait."""


_EXTRAS = ("torch", "transformers", "accelerate", "safetensors", "tensorboard")
# Advice by the operating system's error. Other errors' own messages are enough.
_ADVICE = {
    errno.ENOSPC: "free some space, then run the same command to resume",
    errno.EDQUOT: "your quota is used up: free some space, then run the same command to resume",
    errno.EFBIG: "files cannot be that large here: see `ulimit -f`, or use another disk",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EROFS: "the disk is read-only: name a place on another disk, for a run its `folder`",
    errno.ENOENT: "was it moved or removed?",
    errno.ENOTDIR: "a file is where a folder is needed: move it away, or give another folder",
    errno.EISDIR: "a folder is where a file is needed: move it away, or give another name",
    errno.ELOOP: "a link there leads to itself",
    errno.ENAMETOOLONG: "give it a shorter name",
    errno.EMFILE: "too many files are open: raise `ulimit -n`",
    errno.ENOMEM: "there is not enough memory",
    errno.ESTALE: "the file system lost the file: try again; if that does not help, ask its administrators",
    errno.EIO: "the disk or its network failed: the system's log (dmesg) says more",
}


# Refusal of a process or a thread: by Python; by the C++ library and gloo.
_NO_MORE_PROCESSES = ("can't start new thread", os.strerror(errno.EAGAIN))


def no_more_processes(error: BaseException) -> str:
    """Return the fix if the system refused a process or thread, or "" for another error."""
    if not any(sign in str(error) for sign in _NO_MORE_PROCESSES):
        return ""
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    limit = f", which is {most}," if most != resource.RLIM_INFINITY else ","
    return (
        f"the system gives you no more processes and threads. Fix: a higher `ulimit -u`{limit} a "
        "job in place of the login node, or fewer ranks and workers"
    )


def sentence(error: BaseException) -> str | None:
    """Return the message of an expected kind of error, or None if a traceback is needed.

    `cli/main.py` prints it, and a training run that fails writes it into `outcome.json`.
    """
    if isinstance(error, KieloError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").split(".")[0]
        return f"this verb needs {package}. Fix: pip install 'kielo[train]'" if package in _EXTRAS else None
    if _is_out_of_memory(error):
        where = first_line(error) or "of the CPU"
        return f"{rank_prefix()}out of memory ({where}). Fix: smaller batches or a larger machine"
    if isinstance(error, RecursionError):
        return "a file is nested too deeply. Files that Kielo writes and reads have a few levels"
    if isinstance(error, OSError | RuntimeError) and (said := no_more_processes(error)):
        return f"{rank_prefix()}{said}"
    if isinstance(error, OSError) and error.errno is not None:
        return _of_the_system(error)
    if isinstance(error, UnicodeError | json.JSONDecodeError):
        return f"a file has wrong content ({error}). KIELO_TRACEBACK=1 shows the function that read it"
    if _is_of_other_ranks(error):
        return (
            f"{rank_prefix()}the ranks lost each other{_where(error)} ({first_line(error)}). Another rank's "
            "message, if any, names the cause. Fix for a slow rank: a longer train.step_timeout_seconds"
        )
    return None


def _where(error: BaseException) -> str:
    """Return " at FILE:LINE in FUNCTION" of the innermost line outside of torch, or "" if unknown."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
    if not frames:
        return ""
    last = frames[-1]
    return f" at {'/'.join(last.filename.split('/')[-3:])}:{last.lineno} in {last.name}"


def _of_the_system(error: OSError) -> str:
    paths = " → ".join(str(path) for path in (error.filename, error.filename2) if path is not None)
    reason = error.strerror or (os.strerror(error.errno) if error.errno else str(error))
    advice = _ADVICE.get(error.errno or 0)
    return f"{paths or 'a file or device'}: {reason}" + (f"; {advice}" if advice else "")


def _is_out_of_memory(error: BaseException) -> bool:
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
    )


def _is_of_other_ranks(error: BaseException) -> bool:
    return (
        type(error).__module__.startswith("torch.distributed")
        or type(error).__name__.startswith("Dist")
        or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))
    )


def rank_prefix() -> str:
    """Return e.g. "rank 3: " in a process that a launcher started; else ""."""
    return f"rank {os.environ['RANK']}: " if os.environ.get("RANK") else ""


def first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")[:300]


def print_text(text: str, stream: TextIO | None = None) -> None:
    """Print text, default to stdout. On a terminal break lines between words, but no word such as a path."""
    stream = stream or sys.stdout
    if is_terminal(stream):
        width = shutil.get_terminal_size().columns
        text = "\n".join(_broken(line, width) for line in text.split("\n"))
    print(text, file=stream, flush=True)


def _broken(line: str, width: int) -> str:
    text, indent = line.strip(), " " * (len(line) - len(line.lstrip()))
    wrapper = textwrap.TextWrapper(
        max(width, 20), indent, indent, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.fill(text)


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty() or bool(os.environ.get("FORCE_COLOR"))
