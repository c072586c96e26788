"""Recipients of a checkpoint besides the site: certificates and public keys in PEM, and the private keys to them.

Who calls: the agent at a checkpoint and `gpucr key rewrap` (parse, Recipient.wrap), `gpucr inspect --key` (Opener).
A recipient can read a checkpoint. He cannot make one that is restored: his slot has the data key and not the id key.

    RSA:              RSA-OAEP with SHA-256, the label binds the checkpoint
    EC and X25519:    fresh key pair, ECDH, HKDF-SHA256, AES-256-GCM
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID

from gpucr_hpc.errors import IntegrityError, KeyFileError, RecipientError, WrongKey
from gpucr_hpc.image.keys import KEY_BYTES, DataKey
from gpucr_hpc.model import Json

SLOT_TYPE_RSA = "rsa-oaep"
SLOT_TYPE_ECDH = "ecdh-es"
#: More recipients in one file than this are refused: each costs every checkpoint a public-key operation.
MAX_RECIPIENTS = 16
#: Largest file of recipients.
MAX_FILE_BYTES = 64 << 10
_MIN_RSA_BITS = 2048
_WANTED = "key for encryption: want RSA, EC or X25519"
_BLOCK = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----.*?-----END \1-----", re.DOTALL)
_CURVES: dict[str, type[ec.EllipticCurve]] = {
    "secp256r1": ec.SECP256R1,
    "secp384r1": ec.SECP384R1,
    "secp521r1": ec.SECP521R1,
}
_X25519 = "x25519"

_Public = rsa.RSAPublicKey | ec.EllipticCurvePublicKey | X25519PublicKey
_Private = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | X25519PrivateKey


@dataclass(frozen=True)
class Recipient:
    """Somebody who can read checkpoints. name: the certificate's common name, for people; "" for a bare key."""

    key: _Public
    name: str = ""

    @property
    def key_id(self) -> str:
        """16 hex digits that name the public key, the same for a certificate and the bare key in it."""
        return _key_id(self.key)

    @property
    def method(self) -> str:
        """How it is encrypted to, for people, such as "RSA 3072" or "EC secp256r1"."""
        if isinstance(self.key, rsa.RSAPublicKey):
            return f"RSA {self.key.key_size}"
        return f"EC {_curve(self.key)}"

    def wrap(self, key: DataKey, checkpoint: str) -> Json:
        """A slot for the manifest: the data key, readable with the private key and for this checkpoint only."""
        slot: Json = {"key_id": self.key_id, "name": self.name}
        if isinstance(self.key, rsa.RSAPublicKey):
            public = self.key
            wrapped = key.wrap_with(lambda raw: public.encrypt(raw, _oaep(checkpoint)))
            return slot | {"type": SLOT_TYPE_RSA, "wrapped": wrapped.hex()}
        fresh, shared = _agree(self.key)
        nonce = secrets.token_bytes(12)
        cipher = _wrapping_cipher(shared, fresh, self.key_id, checkpoint)
        wrapped = key.wrap_with(lambda raw: cipher.encrypt(nonce, raw, _context(SLOT_TYPE_ECDH, checkpoint)))
        return slot | {
            "type": SLOT_TYPE_ECDH,
            "curve": _curve(self.key),
            "public": fresh.hex(),
            "nonce": nonce.hex(),
            "wrapped": wrapped.hex(),
        }


def parse(data: bytes, path: object, *, now: datetime | None = None) -> list[Recipient]:
    """Recipients of a PEM file with certificates and public keys, each once.

    Nothing is asked of who signed a certificate: the file's place is the trust. now: when it is used, None means now.
    Raises RecipientError: not PEM, a private key, an expired certificate, one that is not for encryption, a weak key.
    """
    if len(data) > MAX_FILE_BYTES:
        raise RecipientError(path=path, reason=f"has {len(data)} bytes, more than {MAX_FILE_BYTES}")
    found: dict[str, Recipient] = {}
    for number, block in enumerate(_BLOCK.finditer(data), 1):
        where = f"{path}, block {number}"
        recipient = _parse_block(block[1].decode(), block[0], where, now or datetime.now(UTC))
        found.setdefault(recipient.key_id, recipient)
    if not found:
        raise RecipientError(path=path, reason="has no PEM certificate and no PEM public key")
    if len(found) > MAX_RECIPIENTS:
        raise RecipientError(path=path, reason=f"has {len(found)} recipients, more than {MAX_RECIPIENTS}")
    return list(found.values())


class Opener:
    """The private key of a recipient. password: of the file, if it is encrypted. Raises KeyFileError."""

    def __init__(self, pem: bytes, path: object, password: bytes | None = None) -> None:
        try:
            key = serialization.load_pem_private_key(pem, password)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            reason = "wants a passphrase" if isinstance(error, TypeError) and not password else "cannot be read as PEM"
            raise KeyFileError(path=path, reason=f"the private key {reason}") from None
        if not isinstance(key, _Private):
            raise KeyFileError(path=path, reason=f"{type(key).__name__} is no {_WANTED}")
        self._key: _Private = key
        self.key_id = _key_id(key.public_key())

    def __repr__(self) -> str:
        return f"Opener({self.key_id})"

    def unwrap(self, slots: Iterable[Json], checkpoint: str) -> DataKey:
        """The data key out of this recipient's slot. Raises WrongKey (no slot), IntegrityError (damaged slot)."""
        seen = []
        for slot in slots:
            if slot.get("key_id") == self.key_id and slot.get("type") in (SLOT_TYPE_RSA, SLOT_TYPE_ECDH):
                return DataKey(self._open(slot, checkpoint))
            seen.append(str(slot.get("key_id")))
        raise WrongKey(checkpoint=checkpoint, wanted=", ".join(seen) or "nobody", have=self.key_id)

    def _open(self, slot: Json, checkpoint: str) -> bytes:
        where = f"checkpoint {checkpoint}"
        try:
            wrapped = bytes.fromhex(slot["wrapped"])
            if isinstance(self._key, rsa.RSAPrivateKey):
                raw = self._key.decrypt(wrapped, _oaep(checkpoint))
            else:
                public, nonce = bytes.fromhex(slot["public"]), bytes.fromhex(slot["nonce"])
                cipher = _wrapping_cipher(_exchange(self._key, public), public, self.key_id, checkpoint)
                raw = cipher.decrypt(nonce, wrapped, _context(SLOT_TYPE_ECDH, checkpoint))
        except (KeyError, TypeError, ValueError, InvalidTag):
            reason = f"private key {self.key_id} does not open its key slot"
            raise IntegrityError(path=where, reason=reason) from None
        if len(raw) != KEY_BYTES:
            raise IntegrityError(path=where, reason="its key slot has a wrong length")
        return raw


def new_key_pair() -> tuple[bytes, bytes]:
    """A private key (X25519, PKCS 8) and its public half, both PEM."""
    key = X25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


# --- PEM ------------------------------------------------------------------------------------------------


def _parse_block(label: str, pem: bytes, where: str, now: datetime) -> Recipient:
    if "PRIVATE KEY" in label:
        raise RecipientError(path=where, reason="is a private key: only certificates and public keys belong here")
    try:
        if label == "CERTIFICATE":
            certificate = x509.load_pem_x509_certificate(pem)
            _check_certificate(certificate, where, now)
            names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
            return Recipient(_check_key(certificate.public_key(), where), str(names[0].value) if names else "")
        if label in ("PUBLIC KEY", "RSA PUBLIC KEY"):
            return Recipient(_check_key(serialization.load_pem_public_key(pem), where))
    except (ValueError, UnsupportedAlgorithm):
        raise RecipientError(path=where, reason=f"the {label.lower()} cannot be read") from None
    raise RecipientError(path=where, reason=f"is a {label}: want a certificate or a public key")


def _check_certificate(certificate: x509.Certificate, where: str, now: datetime) -> None:
    # not_valid_before_utc came with cryptography 42; the older names give UTC without saying so.
    begin, end = (
        (certificate.not_valid_before_utc, certificate.not_valid_after_utc)
        if hasattr(certificate, "not_valid_after_utc")
        else (certificate.not_valid_before.replace(tzinfo=UTC), certificate.not_valid_after.replace(tzinfo=UTC))
    )
    if not begin <= now <= end:
        raise RecipientError(path=where, reason=f"the certificate is valid from {begin:%Y-%m-%d} to {end:%Y-%m-%d}")
    try:
        usage = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
    except x509.ExtensionNotFound:
        return
    if not (usage.key_encipherment or usage.data_encipherment or usage.key_agreement):
        raise RecipientError(path=where, reason="the certificate's key usage does not allow encryption")


def _check_key(key: object, where: str) -> _Public:
    if isinstance(key, rsa.RSAPublicKey) and key.key_size < _MIN_RSA_BITS:
        raise RecipientError(path=where, reason=f"RSA with {key.key_size} bits: want at least {_MIN_RSA_BITS}")
    if isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name not in _CURVES:
        raise RecipientError(path=where, reason=f"curve {key.curve.name}: want one of {', '.join(_CURVES)}")
    if not isinstance(key, _Public):
        raise RecipientError(path=where, reason=f"{type(key).__name__} is no {_WANTED}")
    return key


# --- arithmetic -----------------------------------------------------------------------------------------


def _key_id(key: _Public) -> str:
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(b"gpucr-v2 recipient " + der).hexdigest()[:16]


def _context(kind: str, checkpoint: str) -> bytes:
    return f"gpucr-v2 slot {kind} {checkpoint}".encode()


def _oaep(checkpoint: str) -> padding.OAEP:
    return padding.OAEP(padding.MGF1(SHA256()), SHA256(), _context(SLOT_TYPE_RSA, checkpoint))


def _curve(key: ec.EllipticCurvePublicKey | X25519PublicKey) -> str:
    return _X25519 if isinstance(key, X25519PublicKey) else key.curve.name


def _wrapping_cipher(shared: bytes, fresh: bytes, key_id: str, checkpoint: str) -> AESGCM:
    info = _context(SLOT_TYPE_ECDH, checkpoint) + b" " + key_id.encode() + b" " + fresh
    return AESGCM(HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(shared))


def _agree(key: ec.EllipticCurvePublicKey | X25519PublicKey) -> tuple[bytes, bytes]:
    """Public half of a fresh key pair, and what it shares with the recipient's key."""
    if isinstance(key, X25519PublicKey):
        fresh = X25519PrivateKey.generate()
        return fresh.public_key().public_bytes_raw(), fresh.exchange(key)
    pair = ec.generate_private_key(key.curve)
    point = pair.public_key().public_bytes(serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint)
    return point, pair.exchange(ec.ECDH(), key)


def _exchange(key: ec.EllipticCurvePrivateKey | X25519PrivateKey, public: bytes) -> bytes:
    """ValueError for a point that is not on the curve."""
    if isinstance(key, X25519PrivateKey):
        return key.exchange(X25519PublicKey.from_public_bytes(public))
    return key.exchange(ec.ECDH(), ec.EllipticCurvePublicKey.from_encoded_point(key.curve, public))
