"""Keys of a site and the data key of a checkpoint, in memory.

Who calls: the agent at a checkpoint (DataKey.generate, wrap) and at a restore (DataKey.unwrap). They are read from
files by keyfiles.py; slots for others than the site are made by recipients.py. No repr shows a secret.

    site key --HKDF(checkpoint id)--> wrapping key --AES-256-GCM--> data key --HKDF(salt, rank)--> image key
             --HKDF(job)--> id key, in the site's slot beside the data key and in no other
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from gpucr_hpc.errors import IntegrityError, WrongKey
from gpucr_hpc.image.chunkid import ChunkIds
from gpucr_hpc.model import Json

#: Length in bytes of every symmetric key, and of the salt of an image.
KEY_BYTES = 32
SLOT_TYPE_SITE = "site"

_NONCE_BYTES = 12
_TAG_BYTES = 16
# The site's slot holds the data key alone (format 1), or data key and id key.
_SITE_SECRETS = {KEY_BYTES + _TAG_BYTES, 2 * KEY_BYTES + _TAG_BYTES}


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

    def id_key(self, job: str) -> bytes:
        """The secret behind the chunk ids of a job's checkpoints, equal for all of them under one site key."""
        return _hkdf(self._raw, None, b"gpucr-v2 id key " + job.encode())


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
    """The key of one checkpoint; fresh for each, on disk only in wrapped form.

    ids: the id key. Only a site's slot has it: a key without one opens chunks and cannot tell whether somebody else
    with the data key has exchanged them, so nothing is restored with it (docs/format.md, section 7).
    """

    def __init__(self, raw: bytes, ids: bytes | None = None) -> None:
        super().__init__(raw)
        if ids is not None and len(ids) != KEY_BYTES:
            raise ValueError(f"an id key has {KEY_BYTES} bytes, not {len(ids)}")
        self._ids = ids

    @classmethod
    def generate(cls, ids: bytes | None = None) -> DataKey:
        """A new key from the kernel's random numbers. ids: SiteKey.id_key, or None for ids that match no others."""
        return cls(secrets.token_bytes(KEY_BYTES), ids or secrets.token_bytes(KEY_BYTES))

    @classmethod
    def from_hex(cls, text: str) -> DataKey:
        """The key that `reveal_hex` gave. Raises ValueError."""
        raw = bytes.fromhex(text)
        return cls(raw[:KEY_BYTES], raw[KEY_BYTES:] or None)

    def reveal_hex(self) -> str:
        """The key itself, for handing it to a worker process over a private socket; nowhere else."""
        return self._secrets().hex()

    @property
    def may_restore(self) -> bool:
        """Whether what this key opens is proven to be what the site's agent wrote."""
        return self._ids is not None

    def same_ids(self, other: DataKey) -> bool:
        """Whether equal chunks have equal ids under both: the same id key, and not none."""
        return self._ids is not None and other._ids is not None and hmac.compare_digest(self._ids, other._ids)

    def chunk_ids(self) -> ChunkIds | None:
        """What names chunks by their content; None without the id key."""
        return None if self._ids is None else ChunkIds(self._ids)

    def wrap(self, site_key: SiteKey, checkpoint_id: str) -> Json:
        """A slot for the manifest: data key and id key, readable with the site key and for this checkpoint id only."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        cipher = site_key.wrapping_key(checkpoint_id)
        return {
            "type": SLOT_TYPE_SITE,
            "key_id": site_key.key_id,
            "nonce": nonce.hex(),
            "wrapped": cipher.encrypt(nonce, self._secrets(), _slot_data(checkpoint_id)).hex(),
        }

    def wrap_with(self, encrypt: Callable[[bytes], bytes]) -> bytes:
        """The data key alone, encrypted by a recipient's own method."""
        return encrypt(self._raw)

    @classmethod
    def unwrap(cls, slots: Iterable[Json], site_keys: Sequence[SiteKey], checkpoint_id: str) -> DataKey:
        """The data key out of the slot for one of the site keys; slots of other types are skipped.

        Raises WrongKey (no slot for these keys; names all key ids), IntegrityError (the slot is damaged or
        belongs to another checkpoint).
        """
        known = {key.key_id: key for key in site_keys}
        others: list[str] = []
        for slot in slots:
            if slot.get("type") != SLOT_TYPE_SITE:
                continue
            key = known.get(str(slot.get("key_id")))
            if key is not None:
                raw = _open_slot(slot, key, checkpoint_id)
                return cls(raw[:KEY_BYTES], raw[KEY_BYTES:] or None)
            others.append(str(slot.get("key_id")))
        wanted = ", ".join(others) or "(none: it has no slot for a site key)"
        raise WrongKey(checkpoint=checkpoint_id, wanted=wanted, have=", ".join(known) or "none")

    def image_key(self, checkpoint: str, node_rank: int, salt: bytes) -> bytes:
        """The 32 bytes of the key of one image.

        The random salt makes the key of every writer different, so that even two writers that were given the
        same data key and rank by mistake never use a nonce twice under one key.
        """
        return _hkdf(self._raw, salt, f"gpucr-v1 image {checkpoint} {node_rank}".encode())

    def _secrets(self) -> bytes:
        return self._raw + (self._ids or b"")


def _slot_data(checkpoint_id: str) -> bytes:
    return b"gpucr-v1 slot site " + checkpoint_id.encode()


def _open_slot(slot: Json, site_key: SiteKey, checkpoint_id: str) -> bytes:
    where = f"checkpoint {checkpoint_id}"
    try:
        nonce, sealed = bytes.fromhex(slot["nonce"]), bytes.fromhex(slot["wrapped"])
    except (KeyError, TypeError, ValueError):
        raise IntegrityError(path=where, reason="its key slot is malformed") from None
    if len(nonce) != _NONCE_BYTES or len(sealed) not in _SITE_SECRETS:
        raise IntegrityError(path=where, reason="its key slot has a wrong length")
    try:
        return site_key.wrapping_key(checkpoint_id).decrypt(nonce, sealed, _slot_data(checkpoint_id))
    except InvalidTag:
        reason = f"site key {site_key.key_id} does not open its key slot"
        raise IntegrityError(path=where, reason=reason) from None
