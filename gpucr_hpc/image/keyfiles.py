"""Files with the keys of a node: what is read, what is refused, how they are made and replaced.

Who calls: the agent and `gpucr doctor` (load_*), `gpucr key` (generate, stage, rotate). Secrets come from files or
descriptors, never from argv or the environment.

    site.key      wraps the data keys of new checkpoints
    site.d/       others that are still, or already, opened: earlier ones as ID.key, the next one as next.key
    signing.key   signs; signing.pub is its public half;  trusted/: public halves of other nodes
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from gpucr_hpc.errors import KeyFileError
from gpucr_hpc.image.keys import KEY_BYTES, PublicKey, SigningKey, SiteKey

#: Name in the directory of other site keys of the one that comes after the current.
NEXT = "next.key"
_FILE_LIMIT_BYTES = 64 << 10


def load_site_key(path: str | Path) -> SiteKey:
    """Read a key of 32 raw bytes or 64 hex digits. Raises KeyFileError."""
    return SiteKey(_parse_key(read_secret(path), path))


def load_site_keys(path: str | Path, others: str | Path) -> tuple[SiteKey, ...]:
    """The current site key, then those in `others`/*.key, each once; a missing directory is an empty one.

    Raises KeyFileError, also when the directory can be written by others than its owner.
    """
    keys = [load_site_key(path)]
    with _directory(others) as fd:
        for name in [] if fd is None else sorted(os.listdir(fd)):
            if name.endswith(".key"):
                shown = Path(others) / name
                key = SiteKey(_parse_key(_read(name, dir_fd=fd, forbidden=0o077, shown=shown), shown))
                if key.key_id not in {known.key_id for known in keys}:
                    keys.append(key)
    return tuple(keys)


def load_signing_key(path: str | Path) -> SigningKey:
    """Read an Ed25519 seed; form and errors as load_site_key."""
    return SigningKey(_parse_key(read_secret(path), path))


def load_trusted(directory: str | Path, own: SigningKey) -> list[PublicKey]:
    """Our own public key and those in `directory`/*.pub, each once; a missing directory is an empty one.

    Whoever can add a file there can have his images restored as root: directory and files must belong to root
    (or the current user) and must not be writable for others. Raises KeyFileError.
    """
    return list(dict.fromkeys([own.public, *_public_keys(directory)]))


def load_public_keys(directory: str | Path, signing: str | Path) -> list[PublicKey]:
    """Whose manifests this node accepts, without its secrets: for a user who reads with a key of his own.

    signing: path of the signing key, whose public half lies beside it as NAME.pub. Raises KeyFileError.
    """
    own = Path(signing).with_suffix(".pub")
    return list(dict.fromkeys([load_public_key(own), *_public_keys(directory)]))


def load_public_key(path: str | Path) -> PublicKey:
    """Read the public half of a signing key; raises KeyFileError."""
    return PublicKey(_parse_key(_read(path, dir_fd=None, forbidden=0o022), path))


def _public_keys(directory: str | Path) -> list[PublicKey]:
    keys = []
    with _directory(directory) as fd:
        for name in [] if fd is None else sorted(os.listdir(fd)):
            if name.endswith(".pub"):
                shown = Path(directory) / name
                keys.append(PublicKey(_parse_key(_read(name, dir_fd=fd, forbidden=0o022, shown=shown), shown)))
    return keys


def generate_keys(directory: str | Path) -> None:
    """Make site.key, signing.key (0600), signing.pub (0644) and the directories trusted (0755) and site.d (0700).

    The directory is made when it is missing (0700). signing.pub is what other nodes put into their trusted
    directory. Raises KeyFileError, and leaves what is there, when one of the keys already exists.
    """
    where = Path(directory)
    signing = SigningKey(secrets.token_bytes(KEY_BYTES))
    files = {
        "site.key": (secrets.token_bytes(KEY_BYTES), 0o600),
        "signing.key": (signing._raw, 0o600),
        "signing.pub": (signing.public.raw, 0o644),
    }
    try:
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in files:
            if os.path.lexists(where / name):
                raise KeyFileError(path=where / name, reason="already exists and is not replaced")
        for name, (raw, mode) in files.items():
            _write_new(where / name, raw.hex().encode() + b"\n", mode)
        (where / "trusted").mkdir(mode=0o755, exist_ok=True)
        (where / "site.d").mkdir(mode=0o700, exist_ok=True)
        _sync_directory(where)
    except OSError as error:
        raise KeyFileError(path=error.filename or where, reason=error.strerror) from None


def write_pair(path: Path, private: bytes, public: bytes) -> Path:
    """Write a private key (0600) to `path` and its public half beside it as PATH.pem; the path of the latter.

    Raises KeyFileError, also when one of them is there.
    """
    beside = path.with_name(path.name + ".pem")
    try:
        if beside.exists():
            raise KeyFileError(path=beside, reason="already exists and is not replaced")
        _write_new(path, private, 0o600)
        _write_new(beside, public, 0o644)
        _sync_directory(path.parent)
    except OSError as error:
        raise KeyFileError(path=error.filename or path, reason=error.strerror) from None
    return beside


def stage(site: str | Path, others: str | Path) -> str:
    """Make the next site key in `others`, where it is opened and not yet used for new checkpoints; its id.

    Raises KeyFileError when there is one already.
    """
    load_site_key(site)
    where, raw = Path(others), secrets.token_bytes(KEY_BYTES)
    try:
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_new(where / NEXT, raw.hex().encode() + b"\n", 0o600)
        _sync_directory(where)
    except FileExistsError:
        raise KeyFileError(path=where / NEXT, reason="already exists: rotate makes it the current one") from None
    except OSError as error:
        raise KeyFileError(path=error.filename or where, reason=error.strerror) from None
    return SiteKey(raw).key_id


def rotate(site: str | Path, others: str | Path) -> tuple[str, str]:
    """Make the staged key the current one and keep the current one in `others` as ID.key; ids of old and new.

    At every moment both are readable, whenever this stops. Raises KeyFileError.
    """
    current, where = load_site_key(site), Path(others)
    following = load_site_key(where / NEXT)
    try:
        kept = where / f"{current.key_id}.key"
        if not kept.exists():
            os.link(site, kept)
            _sync_directory(where)
        os.rename(where / NEXT, site)
        _sync_directory(Path(site).parent)
        _sync_directory(where)
    except OSError as error:
        raise KeyFileError(path=error.filename or where, reason=error.strerror) from None
    return current.key_id, following.key_id


def _write_new(path: Path, data: bytes, mode: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_secret(path: str | Path) -> bytes:
    """Content of a file with a secret: regular, at most 64 KiB, of root or the current user, and closed to others.

    Raises KeyFileError; the content is in no message.
    """
    return _read(path, dir_fd=None, forbidden=0o077)


def read_public(path: str | Path) -> bytes:
    """Content of a file that everybody may read and only root or the current user may write; at most 64 KiB.

    Raises KeyFileError.
    """
    return _read(path, dir_fd=None, forbidden=0o022)


@contextlib.contextmanager
def _directory(path: str | Path) -> Iterator[int | None]:
    """Descriptor of a directory that only its owner may write; None when there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        raise KeyFileError(path=path, reason=error.strerror) from None
    try:
        _check_owner(os.fstat(fd), path, forbidden=0o022)
        yield fd
    finally:
        os.close(fd)


def _read(path: str | Path, *, dir_fd: int | None, forbidden: int, shown: Path | None = None) -> bytes:
    where = shown or path
    # O_NONBLOCK: a FIFO in place of the key must not stop the agent.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, dir_fd=dir_fd)
    except OSError as error:
        raise KeyFileError(path=where, reason=error.strerror) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise KeyFileError(path=where, reason="not a regular file")
        _check_owner(status, where, forbidden)
        if status.st_size > _FILE_LIMIT_BYTES:
            raise KeyFileError(path=where, reason=f"has {status.st_size} bytes, more than {_FILE_LIMIT_BYTES}")
        return os.read(fd, _FILE_LIMIT_BYTES)
    except OSError as error:
        raise KeyFileError(path=where, reason=error.strerror) from None
    finally:
        os.close(fd)


def _check_owner(status: os.stat_result, where: str | Path, forbidden: int) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise KeyFileError(path=where, reason=f"belongs to uid {status.st_uid}, want root")
    if status.st_mode & forbidden:
        mode = stat.S_IMODE(status.st_mode)
        raise KeyFileError(path=where, reason=f"mode {mode:04o} lets others in, forbidden is {forbidden:04o}")


def _parse_key(data: bytes, where: str | Path) -> bytes:
    if len(data) == KEY_BYTES:
        return data
    digits = data.removesuffix(b"\n")
    if len(digits) == 2 * KEY_BYTES and not digits.strip(b"0123456789abcdefABCDEF"):
        with contextlib.suppress(ValueError):
            return bytes.fromhex(digits.decode())
    raise KeyFileError(path=where, reason="want 32 raw bytes or 64 hex digits and a newline")
