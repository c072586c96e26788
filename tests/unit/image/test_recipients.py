"""Recipients: what is taken from PEM, what is refused, and that a slot opens for its key and place alone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa, x25519
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import NameOID

from gpucr_hpc.errors import IntegrityError, KeyFileError, RecipientError, WrongKey
from gpucr_hpc.image import recipients
from gpucr_hpc.image.keys import DataKey, SiteKey
from gpucr_hpc.image.recipients import Opener, Recipient, new_key_pair, parse

CHECKPOINT, OTHER = "20261127T232501Z-3f9a", "20261127T232502Z-0000"
NOW = datetime(2026, 11, 28, tzinfo=UTC)
MAKERS = {
    "rsa": lambda: rsa.generate_private_key(65537, 2048),
    "p256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "p384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "p521": lambda: ec.generate_private_key(ec.SECP521R1()),
    "x25519": x25519.X25519PrivateKey.generate,
}


@pytest.fixture(scope="module")
def keys():
    return {name: make() for name, make in MAKERS.items()}


def private_pem(key, password: bytes | None = None) -> bytes:
    cover = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, cover)


def public_pem(key) -> bytes:
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def certificate(key, *, begin=NOW - timedelta(1), end=NOW + timedelta(1), usage=None, signer=None) -> bytes:
    signer = signer or ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Auditor Ö")])
    builder = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(7).not_valid_before(begin).not_valid_after(end)
    )  # fmt: skip
    if usage is not None:
        flags = dict.fromkeys(
            ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
             "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"), False,
        )  # fmt: skip
        builder = builder.add_extension(x509.KeyUsage(**(flags | {usage: True})), critical=True)
    return builder.sign(signer, SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("form", [public_pem, certificate])
def test_slot_opens_for_its_private_key(keys, kind, form):
    """Certificate or bare key, RSA or elliptic curve: the data key comes back, the id key never."""
    (recipient,) = parse(form(keys[kind]), "f", now=NOW)
    key = DataKey.generate()
    slot = recipient.wrap(key, CHECKPOINT)
    opener = Opener(private_pem(keys[kind]), "k")
    assert recipient.key_id == opener.key_id == slot["key_id"]
    opened = opener.unwrap([{"type": "site"}, slot], CHECKPOINT)
    assert key._raw == opened._raw
    assert key.may_restore and not opened.may_restore
    assert opened.chunk_ids() is None
    for secret in (key._raw.hex(), key._ids.hex()):
        assert secret not in str(slot)


@pytest.mark.parametrize("kind", MAKERS)
def test_slot_opens_nowhere_else(keys, kind):
    """Not for another checkpoint, not for another key, not damaged; each says which key it is about."""
    (recipient,) = parse(public_pem(keys[kind]), "f")
    slot, opener = recipient.wrap(DataKey.generate(), CHECKPOINT), Opener(private_pem(keys[kind]), "k")
    with pytest.raises(IntegrityError, match=opener.key_id):
        opener.unwrap([slot], OTHER)
    stranger = Opener(private_pem(MAKERS[kind]()), "k")
    with pytest.raises(WrongKey, match=stranger.key_id):
        stranger.unwrap([slot], CHECKPOINT)
    with pytest.raises(IntegrityError):
        stranger.unwrap([slot | {"key_id": stranger.key_id}], CHECKPOINT)
    for field in set(slot) & {"wrapped", "public", "nonce"}:
        flipped = f"{int(slot[field][:2], 16) ^ 1:02x}{slot[field][2:]}"
        for value in ("zz", "", slot[field][2:], flipped, 5, None):
            with pytest.raises(IntegrityError, match="key slot"):
                opener.unwrap([slot | {field: value}], CHECKPOINT)
    with pytest.raises(IntegrityError):
        opener.unwrap([{k: v for k, v in slot.items() if k != "wrapped"}], CHECKPOINT)


def test_two_slots_have_nothing_in_common(keys):
    """A fresh key pair, or fresh padding, for each slot."""
    for key in keys.values():
        recipient = Recipient(key.public_key())
        data = DataKey.generate()
        assert recipient.wrap(data, CHECKPOINT)["wrapped"] != recipient.wrap(data, CHECKPOINT)["wrapped"]


def test_file_of_several(keys):
    """Certificates and keys in one file, text between them; the same key twice is one recipient."""
    pem = [b"my laptop:\n", public_pem(keys["rsa"]), certificate(keys["p256"]), b"# again\n", public_pem(keys["p256"])]
    found = parse(b"".join(pem), "f", now=NOW)
    assert [("RSA 2048", ""), ("EC secp256r1", "Auditor Ö")] == [(r.method, r.name) for r in found]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (lambda _: b"", "no PEM certificate"),
        (lambda _: b"ssh-ed25519 AAAA me", "no PEM certificate"),
        (lambda k: private_pem(k["p256"]), "block 1: is a private key"),
        (lambda k: public_pem(k["p256"]) + private_pem(k["rsa"]), "block 2: is a private key"),
        (lambda _: public_pem(ed25519.Ed25519PrivateKey.generate()), "no key for encryption"),
        (lambda _: public_pem(ec.generate_private_key(ec.SECP256K1())), "curve secp256k1"),
        (lambda _: public_pem(rsa.generate_private_key(65537, 1024)), "RSA with 1024 bits"),
        (lambda k: certificate(k["p256"], end=NOW - timedelta(hours=1)), "valid from 2026-11-27 to 2026-11-27"),
        (lambda k: certificate(k["p256"], begin=NOW + timedelta(hours=1)), "valid from"),
        (lambda k: certificate(k["rsa"], usage="digital_signature"), "key usage"),
        (lambda _: b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "certificate cannot be read"),
        (lambda _: b"-----BEGIN PUBLIC KEY-----\n!!\n-----END PUBLIC KEY-----\n", "public key cannot be read"),
        (lambda _: b"-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n", "is a X509 CRL"),
        (lambda _: bytes(recipients.MAX_FILE_BYTES + 1), "more than"),
        (lambda _: b"".join(public_pem(x25519.X25519PrivateKey.generate()) for _i in range(17)), "17 recipients"),
    ],
)
def test_refused(keys, content, reason):
    """What is no good recipient is refused with file, block and reason."""
    with pytest.raises(RecipientError, match=rf"^f.*{reason}"):
        parse(content(keys), "f", now=NOW)


@pytest.mark.parametrize("usage", ["key_encipherment", "key_agreement"])
def test_key_usage_that_fits(keys, usage):
    """A certificate that says that it is for encryption is taken."""
    assert parse(certificate(keys["rsa"], usage=usage), "f", now=NOW)


def test_private_key_files(keys):
    """With a passphrase, without one that is wanted, not a key, a key of the wrong kind."""
    covered = private_pem(keys["p256"], b"word")
    assert Opener(covered, "k", b"word").key_id == Opener(private_pem(keys["p256"]), "k").key_id
    for pem, password in ((covered, None), (covered, b"wrong"), (b"", None), (public_pem(keys["rsa"]), None)):
        with pytest.raises(KeyFileError, match=r"^k: the private key"):
            Opener(pem, "k", password)
    with pytest.raises(KeyFileError, match="no key for encryption"):
        Opener(private_pem(ed25519.Ed25519PrivateKey.generate()), "k")


def test_new_key_pair():
    """What `gpucr key generate --recipient` makes works together."""
    private, public = new_key_pair()
    (recipient,) = parse(public, "f")
    assert recipient.key_id == Opener(private, "k").key_id


def test_site_slot_has_both_keys():
    """Only the site's slot carries what proves that chunks are the agent's; a key of format 1 has no such proof."""
    site, other = SiteKey(b"s" * 32), SiteKey(b"o" * 32)
    key = DataKey.generate(site.id_key("41"))
    opened = DataKey.unwrap([key.wrap(site, CHECKPOINT)], [other, site], CHECKPOINT)
    assert opened.may_restore
    assert key.chunk_ids().of(b"x") == opened.chunk_ids().of(b"x")
    assert key.reveal_hex() == DataKey.from_hex(key.reveal_hex()).reveal_hex()
    old = DataKey.unwrap([DataKey(b"d" * 32).wrap(site, CHECKPOINT)], [site], CHECKPOINT)
    assert not old.may_restore


def test_id_key_is_the_jobs():
    """The same for all checkpoints of a job, another for another job or site key."""
    site = SiteKey(b"s" * 32)
    assert site.id_key("41") == site.id_key("41")
    assert 3 == len({site.id_key("41"), site.id_key("42"), SiteKey(b"o" * 32).id_key("41")})
