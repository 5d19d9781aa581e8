"""Files of other machines by fsspec: listed, downloaded and uploaded in pieces that resume, and verified.

Keys and passwords come from the environment or from the settings of each file system (~/.aws, `hf auth
login`, ~/.netrc). Kielo neither reads nor stores them.
"""

import base64
import errno
import hashlib
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar
from urllib.parse import unquote, urlsplit

import xxhash

from kielo.recipe.addresses import scheme_of
from kielo.recipe.errors import KieloError

PIECE_BYTES = 16 << 20  # of one request
TRIES, FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 6, 1.0, 30.0
CONNECT_SECONDS, READ_SECONDS = 30, 120
_WEB = ("http", "https")
# File systems that are flat, so that a folder needs no making.
_WITHOUT_FOLDERS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory")
_RESUME = "the same command resumes"
T = TypeVar("T")
_PASSING_STATUS = frozenset({408, 423, 425, 429})  # of statuses below 500
_OF_THIS_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
_LASTING = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)
_NETWORK_PACKAGES = frozenset({"aiohttp", "botocore", "httpx", "httpcore", "requests", "urllib3"})
_QUERY = re.compile(r"(https?://[^\s?'\"<>]+)\?[^\s'\"<>)]*")
# Keys of fsspec's descriptions of a file that change when its content changes, the best first.
_VERSION_KEYS = (
    "ETag", "etag", "md5Hash", "Content-MD5", "Digest", "blob_id", "generation", "VersionId", "Last-Modified",
    "LastModified", "last_modified", "mtime", "created",
)  # fmt: skip


class ChangedFile(Exception):
    """A file that changed while it was read."""


class _NoRanges(Exception):
    """A server that sends whole files only."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a file system. version: changes with its content, or "". checksum: (algorithm, hex)."""

    path: str
    name: str  # below the folder of the address, or below the folder before a pattern's first sign
    bytes: int | None
    version: str
    checksum: tuple[str, str] | None


class RemoteFiles:
    """The file system of an address. Raises KieloError for a package that is missing."""

    def __init__(self, address: str, say: Callable[[str], None] = lambda line: None) -> None:
        self.address, self._say = address, say
        self._is_web = scheme_of(address) in _WEB
        self.system, self.path = _opened(address)
        self.system.invalidate_cache()

    def files(self) -> list[RemoteFile]:
        """List the file, the files below the folder, or the files of the pattern, by name."""
        return self.tried(self._files, self.address)

    def describe(self, path: str, name: str) -> RemoteFile:
        """Return a file's size, version and checksum as the server tells them now."""
        return self.tried(lambda: self._describe(path, name), path)

    def _files(self) -> list[RemoteFile]:
        system, path = self.system, self.path
        sign = re.search(r"[*\[]" if self._is_web else r"[*?\[]", path)
        if sign is None:
            told = system.info(path)
            if told.get("type") != "directory":
                name = PurePosixPath(urlsplit(path).path if self._is_web else path).name
                return [self._describe(path, unquote(name) if self._is_web else name, told)]
            root, found = path.rstrip("/"), system.find(path, detail=True)
        else:
            root = path[: sign.start()].rpartition("/")[0]
            found = system.glob(path, detail=True)
            for folder in [name for name, told in found.items() if told.get("type") == "directory"]:
                found |= system.find(folder, detail=True)
        files = {name: told for name, told in sorted(found.items()) if told.get("type") != "directory"}
        names = {path: path[len(root) :].lstrip("/") for path in files}
        if self._is_web:
            names = {path: unquote(urlsplit(name).path) for path, name in names.items()}
        return [self._describe(path, names[path], told) for path, told in files.items()]

    def _describe(self, path: str, name: str, told: Any = None) -> RemoteFile:
        if told is None or told.get("size") is None:  # pages that list files tell no sizes
            self.system.invalidate_cache()
            told = self.system.info(path)
        version = next((told[key] for key in _VERSION_KEYS if told.get(key)), "")
        if isinstance(version, datetime):  # lists and single files may tell a time differently
            version = version.timestamp()
        return RemoteFile(path, name, told.get("size"), str(version), _checksum(told))

    def download(self, one: RemoteFile, part: Path) -> None:
        """Fetch a file into `part`, beginning where an earlier call ended. Verify version, size and checksum.

        Raises ChangedFile if the file changed since it was listed. Raises KieloError for a wrong checksum,
        and if the connection broke off TRIES times without a byte between.
        """
        try:
            self.tried(lambda: self._read_on(one, part), one.path, lambda: _size(part), _fix_of(one))
        except _NoRanges:
            self.tried(lambda: self._read_whole(one, part), one.path, fix=_other_server("with ranges"))
        now = self.describe(one.path, one.name)
        has_other_size = one.bytes is not None and _size(part) != one.bytes
        if has_other_size or (now.bytes, now.version) != (one.bytes, one.version):
            raise ChangedFile(one.name)
        if one.checksum is not None and _hash(part, one.checksum[0]) != one.checksum[1]:
            part.unlink()
            raise KieloError(
                f"{without_query(one.path)}: has another {one.checksum[0]} than the server tells, and was "
                "removed. Fix: the same command fetches it again"
            )

    def _read_on(self, one: RemoteFile, part: Path) -> None:
        if one.bytes is None or not (one.version or one.checksum):  # pieces could be of two files
            return self._read_whole(one, part)
        have = _size(part) if _size(part) <= one.bytes else 0
        with self._opened_in_pieces(one.path) as source, open(part, "ab") as to:
            to.truncate(have)
            try:
                source.seek(have)
                _copy(source, to)
            except ValueError:
                raise _NoRanges from None
        self._refuse_short(one, part)

    def _read_whole(self, one: RemoteFile, part: Path) -> None:
        """Read from the beginning, in a single request."""
        with self.system.open(one.path, "rb", block_size=0) as source, open(part, "wb") as to:
            _copy(source, to)
        self._refuse_short(one, part)

    def _opened_in_pieces(self, path: str) -> Any:
        return self.system.open(path, "rb", block_size=PIECE_BYTES, cache_type="none")

    def _refuse_short(self, one: RemoteFile, part: Path) -> None:
        if one.bytes is None or _size(part) >= one.bytes:
            return
        now = self._describe(one.path, one.name)
        if (now.bytes, now.version) != (one.bytes, one.version):
            raise ChangedFile(one.name)
        raise ConnectionError(f"ended after {_size(part):,} of {one.bytes:,} bytes")

    def read(self, path: str) -> bytes | None:
        """Return the content of a small file, or None without it."""

        def content() -> bytes | None:
            try:
                return self.system.cat_file(path)
            except FileNotFoundError as problem:
                if is_lasting(problem):
                    return None
                raise

        self.system.invalidate_cache()
        return self.tried(content, path)

    def below(self, *names: str) -> str:
        return "/".join((self.path.rstrip("/"), *names))

    def exists(self, path: str) -> bool:
        self.system.invalidate_cache()
        return self.tried(lambda: self.system.exists(path), path)

    def is_same(self, file: Path, path: str) -> bool:
        """Return True if a file of this disk is at `path` with the same bytes."""
        return self.tried(lambda: self._is_same(file, path), path)

    def _is_same(self, file: Path, path: str) -> bool:
        self.system.invalidate_cache()
        if not self.system.exists(path) or self.system.info(path)["size"] != file.stat().st_size:
            return False
        with self._opened_in_pieces(path) as copy, open(file, "rb") as own:
            return _digest(copy) == _digest(own)

    def put(self, file: Path, path: str) -> bool:
        """Copy a file to `path` unless it is there. Read it there: KieloError if its bytes differ."""

        def send() -> bool:
            if self._is_same(file, path):
                return False
            if scheme_of(self.address) not in _WITHOUT_FOLDERS:
                self.system.makedirs(path.rpartition("/")[0], exist_ok=True)
            self.system.put_file(str(file), path)
            if not self._is_same(file, path):
                raise KieloError(f"{path}: was read back with other bytes than {file}. Fix: copy it again")
            return True

        return self.tried(send, path)

    def write(self, path: str, content: bytes) -> None:
        """Write a small file to `path`."""

        def send() -> None:
            if scheme_of(self.address) not in _WITHOUT_FOLDERS:
                self.system.makedirs(path.rpartition("/")[0], exist_ok=True)
            self.system.pipe_file(path, content)

        self.tried(send, path)

    def remove(self, path: str) -> None:
        self.tried(lambda: self.system.rm_file(path), path)

    def tried(
        self, act: Callable[[], T], what: str, have: Callable[[], int] = lambda: 0, fix: str = _RESUME
    ) -> T:
        """Act until it succeeds. A problem that may pass is tried again. `have` counts bytes: progress.

        fix: of the error after the last try.
        """
        failed, reached = 0, -1
        while True:
            try:
                return act()
            except (KieloError, ChangedFile, _NoRanges):
                raise
            except Exception as problem:
                if getattr(problem, "errno", None) in _OF_THIS_DISK:
                    raise
                failed = failed + 1 if have() <= reached else 1
                reached = max(have(), reached)
                told = f"{without_query(what)}: {reason(problem)}"
                if is_lasting(problem):
                    raise KieloError(f"{told}. Fix: another address, or other keys") from None
                if failed >= TRIES:
                    raise KieloError(f"{told}. Fix: {fix}") from None
                self._say(f"{told}. It is tried again")
                time.sleep(min(FIRST_WAIT_SECONDS * 2 ** (failed - 1), MAX_WAIT_SECONDS))


def _opened(address: str) -> tuple[Any, str]:
    """Return fsspec's file system of an address, and the path in it."""
    from fsspec.core import url_to_fs
    from fsspec.registry import known_implementations

    scheme, options = scheme_of(address), dict[str, Any]()
    try:
        if scheme in _WEB:
            import aiohttp

            limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
            # trust_env: proxies and ~/.netrc. Bytes are stored as the server has them, compressed or not.
            options["client_kwargs"] = {"timeout": limits, "trust_env": True, "auto_decompress": False}
            options["headers"] = {"Accept-Encoding": "identity"}
        return url_to_fs(address, **options)
    except ImportError:
        known = known_implementations[scheme]["class"].partition(".")[0]
        package = {"fsspec": "aiohttp"}.get(known, known)
        fix = "'kielo[remote]'" if package in ("aiohttp", "s3fs") else package
        raise KieloError(f"{address}: needs the package {package}. Fix: pip install {fix}") from None
    except ValueError as problem:
        raise KieloError(f"{address}: {problem}. Fix: https://, s3://, hf://, or a path") from None


def _fix_of(one: RemoteFile) -> str:
    if one.bytes is None:
        return _other_server("that tells Content-Length")
    return _RESUME if one.version or one.checksum else _other_server("that tells ETag or Last-Modified")


def _other_server(kind: str) -> str:
    return f"a server or mirror {kind}, or download the file and give its path"


def _copy(source: Any, to: IO[bytes]) -> None:
    while piece := source.read(PIECE_BYTES):
        to.write(piece)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _hash(path: Path, algorithm: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def _digest(file: Any) -> str:
    digest = xxhash.xxh3_128()
    while piece := file.read(PIECE_BYTES):
        digest.update(piece)
    return digest.hexdigest()


def _checksum(told: dict[str, Any]) -> tuple[str, str] | None:
    """Return the checksum of the content that a server tells. An ETag of S3 is not always an MD5."""
    if sha256 := getattr(told.get("lfs"), "sha256", None):  # of the Hugging Face hub
        return "sha256", sha256
    digest = re.fullmatch(r"sha-256=([A-Za-z0-9+/=]+)", str(told.get("Digest", "")), re.IGNORECASE)
    coded = digest[1] if digest else told.get("Content-MD5") or told.get("md5Hash")
    if coded:
        with suppress(ValueError):
            return ("sha256" if digest else "md5"), base64.b64decode(coded, validate=True).hex()
    return None


def is_lasting(problem: BaseException) -> bool:
    """Return True for a problem that a second try will not solve: not found, not permitted, a wrong value."""
    status = _status(problem) or _status(problem.__cause__)
    if status is not None:
        return status < 500 and status not in _PASSING_STATUS
    cause = problem.__cause__ or problem
    if isinstance(cause, _LASTING) or "Credentials" in type(cause).__name__:
        return True
    return (
        not isinstance(cause, OSError) and type(cause).__module__.partition(".")[0] not in _NETWORK_PACKAGES
    )


def _status(problem: BaseException | None) -> int | None:
    """Return the status of an answer over HTTP, as aiohttp, httpx or botocore have it."""
    answer = getattr(problem, "response", None)
    if isinstance(answer, dict):
        return answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    found = getattr(problem, "status", None) or getattr(answer, "status_code", None)
    return found if isinstance(found, int) else None


def reason(problem: BaseException) -> str:
    """Return why a request failed, on one line."""
    status = _status(problem) or _status(problem.__cause__)
    cause = problem.__cause__ or problem
    if status is not None:
        told = f"the server answered {status}"
    elif isinstance(problem, FileNotFoundError) and isinstance(cause, FileNotFoundError):
        told = "not found"
    else:
        told = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
    return without_query(" ".join(told.split()))[:400]


def without_query(text: str) -> str:
    """Return a text without the queries of its addresses. A server's redirection can have a key there."""
    return _QUERY.sub(r"\1?…", text)
