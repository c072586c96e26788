"""Key files of a node and the data key of a checkpoint.

Who calls: the agent at its start (load_*), the coordinator at a checkpoint (DataKey.generate, wrap) and at a
restore (DataKey.unwrap). Secrets come from files only, never from argv or the
environment, and no repr shows them.

    site key --HKDF(checkpoint id)--> wrapping key --AES-256-GCM--> data key --HKDF(salt, rank)--> image key
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from gpucr_hpc.errors import IntegrityError, KeyFileError, WrongKey
from gpucr_hpc.model import Json

#: Length in bytes of every key of format 1, and of the salt of an image.
KEY_BYTES = 32
SLOT_TYPE_SITE = "site"

_NONCE_BYTES = 12
_WRAPPED_BYTES = KEY_BYTES + 16
_FILE_LIMIT_BYTES = 4096


def _hkdf(key: bytes, salt: bytes | None, info: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=salt, info=info).derive(key)


class _Secret:
    """32 secret bytes that no repr, pickle or comparison shows."""

    def __init__(self, raw: bytes) -> None:
        if len(raw) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(raw)}")
        self._raw = bytes(raw)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(<secret>)"

    def __reduce__(self) -> str:
        raise TypeError(f"a {type(self).__name__} cannot be pickled")


class SiteKey(_Secret):
    """The cluster's key that wraps the data key of each checkpoint."""

    @property
    def key_id(self) -> str:
        """16 hex digits that name the key and do not help to find it."""
        return _hkdf(self._raw, None, b"gpucr-v1 site key id")[:8].hex()

    def wrapping_key(self, checkpoint_id: str) -> AESGCM:
        """The cipher that wraps the data key of one checkpoint."""
        return AESGCM(_hkdf(self._raw, None, b"gpucr-v1 wrap " + checkpoint_id.encode()))


@dataclass(frozen=True)
class PublicKey:
    """An Ed25519 public key whose manifests are accepted."""

    raw: bytes

    def __post_init__(self) -> None:
        if len(self.raw) != KEY_BYTES:
            raise ValueError(f"a public key has {KEY_BYTES} bytes, not {len(self.raw)}")

    @property
    def key_id(self) -> str:
        """16 hex digits that name the key."""
        return hashlib.sha256(b"gpucr-v1 public key " + self.raw).hexdigest()[:16]

    def verifies(self, signature: bytes, data: bytes) -> bool:
        """True when the owner of the private key signed exactly these bytes."""
        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, data)
        except (InvalidSignature, ValueError):
            return False
        return True


class SigningKey(_Secret):
    """The agent's Ed25519 private key (its 32-byte seed)."""

    @property
    def public(self) -> PublicKey:
        """The key that others need in their directory of trusted keys."""
        return PublicKey(Ed25519PrivateKey.from_private_bytes(self._raw).public_key().public_bytes_raw())

    def private_key(self) -> Ed25519PrivateKey:
        """The key for a library that signs by itself (TLS)."""
        return Ed25519PrivateKey.from_private_bytes(self._raw)

    def sign(self, data: bytes) -> bytes:
        """A signature of 64 bytes."""
        return Ed25519PrivateKey.from_private_bytes(self._raw).sign(data)


class DataKey(_Secret):
    """The key of one checkpoint; fresh for each, on disk only in wrapped form."""

    @classmethod
    def generate(cls) -> DataKey:
        """A new key from the kernel's random numbers."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def from_hex(cls, text: str) -> DataKey:
        """The key that `reveal_hex` gave. Raises ValueError."""
        return cls(bytes.fromhex(text))

    def reveal_hex(self) -> str:
        """The key itself, for handing it to a worker process over a private socket; nowhere else."""
        return self._raw.hex()

    def wrap(self, site_key: SiteKey, checkpoint_id: str) -> Json:
        """A slot for the manifest: this key, readable with the site key and for this checkpoint id only."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = site_key.wrapping_key(checkpoint_id).encrypt(nonce, self._raw, _slot_data(checkpoint_id))
        return {
            "type": SLOT_TYPE_SITE,
            "key_id": site_key.key_id,
            "nonce": nonce.hex(),
            "wrapped": sealed.hex(),
        }

    @classmethod
    def unwrap(cls, slots: Iterable[Json], site_key: SiteKey, checkpoint_id: str) -> DataKey:
        """The data key out of the slot for this site key; slots of other types are skipped.

        Raises WrongKey (no slot for this key; names both key ids), IntegrityError (the slot is damaged or
        belongs to another checkpoint).
        """
        others: list[str] = []
        for slot in slots:
            if slot.get("type") != SLOT_TYPE_SITE:
                continue
            if slot.get("key_id") == site_key.key_id:
                return cls(_open_slot(slot, site_key, checkpoint_id))
            others.append(str(slot.get("key_id")))
        wanted = ", ".join(others) or "(none: it has no slot for a site key)"
        raise WrongKey(checkpoint=checkpoint_id, wanted=wanted, have=site_key.key_id)

    def image_key(self, checkpoint: str, node_rank: int, salt: bytes) -> AESGCM:
        """The cipher of one image.

        The random salt makes the key of every writer different, so that even two writers that were given the
        same data key and rank by mistake never use a nonce twice under one key.
        """
        return AESGCM(_hkdf(self._raw, salt, f"gpucr-v1 image {checkpoint} {node_rank}".encode()))


def _slot_data(checkpoint_id: str) -> bytes:
    return b"gpucr-v1 slot site " + checkpoint_id.encode()


def _open_slot(slot: Json, site_key: SiteKey, checkpoint_id: str) -> bytes:
    where = f"checkpoint {checkpoint_id}"
    try:
        nonce, sealed = bytes.fromhex(slot["nonce"]), bytes.fromhex(slot["wrapped"])
    except (KeyError, TypeError, ValueError):
        raise IntegrityError(path=where, reason="its key slot is malformed") from None
    if len(nonce) != _NONCE_BYTES or len(sealed) != _WRAPPED_BYTES:
        raise IntegrityError(path=where, reason="its key slot has a wrong length")
    try:
        return site_key.wrapping_key(checkpoint_id).decrypt(nonce, sealed, _slot_data(checkpoint_id))
    except InvalidTag:
        reason = f"site key {site_key.key_id} does not open its key slot"
        raise IntegrityError(path=where, reason=reason) from None


# --- files ----------------------------------------------------------------------------------------------


def load_site_key(path: str | Path) -> SiteKey:
    """Read a key of 32 raw bytes or 64 hex digits. Raises KeyFileError."""
    return SiteKey(_read_key(path, dir_fd=None, forbidden=0o077))


def load_signing_key(path: str | Path) -> SigningKey:
    """Read an Ed25519 seed; form and errors as load_site_key."""
    return SigningKey(_read_key(path, dir_fd=None, forbidden=0o077))


def load_trusted(directory: str | Path, own: SigningKey) -> list[PublicKey]:
    """Our own public key and those in `directory`/*.pub, each once; a missing directory is an empty one.

    Whoever can add a file there can have his images restored as root: directory and files must belong to root
    (or the current user) and must not be writable for others. Raises KeyFileError.
    """
    keys = [own.public]
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return keys
    except OSError as error:
        raise KeyFileError(path=directory, reason=error.strerror) from None
    try:
        _check_owner(os.fstat(fd), directory, forbidden=0o022)
        for name in sorted(os.listdir(fd)):
            if name.endswith(".pub"):
                shown = Path(directory) / name
                key = PublicKey(_read_key(name, dir_fd=fd, forbidden=0o022, shown=shown))
                if key not in keys:
                    keys.append(key)
    finally:
        os.close(fd)
    return keys


def generate_keys(directory: str | Path) -> None:
    """Make site.key, signing.key (0600), signing.pub (0644) and the directory trusted (0755).

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
        _sync_directory(where)
    except OSError as error:
        raise KeyFileError(path=error.filename or where, reason=error.strerror) from None


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


def _read_key(path: str | Path, *, dir_fd: int | None, forbidden: int, shown: Path | None = None) -> bytes:
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
        data = os.read(fd, _FILE_LIMIT_BYTES)
    except OSError as error:
        raise KeyFileError(path=where, reason=error.strerror) from None
    finally:
        os.close(fd)
    return _parse_key(data, where)


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
