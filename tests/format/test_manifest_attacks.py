"""Attacks on the signed manifest and the key slots."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_samples import CHECKPOINT, OTHER, SIGNING, SITE

from gpucr_hpc.errors import FormatUnknown, IntegrityError, SignatureError, UsageError, WrongKey
from gpucr_hpc.image.keys import DataKey, SigningKey, SiteKey
from gpucr_hpc.image.manifest import MANIFEST_HEADER_BYTES, decode, encode
from gpucr_hpc.model import canonical_json

TRUSTED = [SIGNING.public]
STRANGER = SigningKey(b"s" * 32)


@pytest.fixture(scope="module")
def signed(good) -> bytes:
    return good.signed()


def sign_body(body: bytes, key: SigningKey = SIGNING) -> bytes:
    head = struct.pack("<8sHHIQ32s", b"GPUCRMAN", 1, 0, 0, len(body), key.public.raw)
    return head + key.sign(b"gpucr-v1 manifest\0" + head + body) + body


def test_reads_back(good, signed):
    """A manifest comes back equal, from any trusted signer."""
    manifest = decode(signed, "m", [STRANGER.public, *TRUSTED])
    assert good.entry == manifest.images[0]
    assert manifest.meta == {"criu": "4.2.1", "files": [{"path": "/home/ä", "size_bytes": 7}]}
    assert manifest == decode(signed, "m", TRUSTED, job="41", checkpoint=CHECKPOINT)


def test_stranger_signed(good):
    """A good signature of a key that is not trusted is refused, with the key's id."""
    data = encode(good.manifest(), STRANGER)
    with pytest.raises(SignatureError, match=STRANGER.public.key_id):
        decode(data, "m", TRUSTED)


def test_unsigned(good):
    """Zeros in place of a signature are refused."""
    data = bytearray(good.signed())
    data[MANIFEST_HEADER_BYTES - 64 : MANIFEST_HEADER_BYTES] = bytes(64)
    with pytest.raises(SignatureError, match="does not match"):
        decode(bytes(data), "m", TRUSTED)


def test_signer_claimed_falsely(good):
    """The name of a trusted signer over another one's signature is refused."""
    data = bytearray(encode(good.manifest(), STRANGER))
    data[24:56] = SIGNING.public.raw
    with pytest.raises(SignatureError, match="does not match"):
        decode(bytes(data), "m", TRUSTED)


def test_truncation_at_every_boundary(signed):
    """A manifest cut anywhere is refused as damaged."""
    for cut in [*range(0, MANIFEST_HEADER_BYTES + 2), len(signed) // 2, len(signed) - 1]:
        with pytest.raises(IntegrityError):
            decode(signed[:cut], "m", TRUSTED)
    with pytest.raises(IntegrityError):
        decode(signed + b"\n", "m", TRUSTED)


@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=150)
def test_bit_flip_anywhere(signed, where, bit):
    """One bit changed anywhere is refused."""
    data = bytearray(signed)
    data[int(where * len(data))] ^= 1 << bit
    with pytest.raises((IntegrityError, SignatureError, FormatUnknown)):
        decode(bytes(data), "m", TRUSTED)


@given(data=st.binary(max_size=300))
@settings(max_examples=150)
def test_anything_is_refused(data):
    """Arbitrary bytes are never a manifest."""
    with pytest.raises((IntegrityError, SignatureError, FormatUnknown)):
        decode(data, "m", TRUSTED)


def test_unknown_version(signed):
    """A later version is named, and known before the signature is looked at."""
    data = bytearray(signed)
    data[8:10] = struct.pack("<H", 3)
    with pytest.raises(FormatUnknown, match=r"m: format version 3 is not known \(this release reads 1 and 2\)"):
        decode(bytes(data), "m", [])


def test_older_manifest_of_another_job_in_its_place(good):
    """A well-signed manifest of another job or checkpoint is refused where the caller says what it wants."""
    other = good.signed(job="40")
    assert decode(other, "m", TRUSTED).job == "40"
    with pytest.raises(IntegrityError, match="belongs to job 40"):
        decode(other, "m", TRUSTED, job="41")
    with pytest.raises(IntegrityError, match=f"checkpoint {CHECKPOINT}"):
        decode(good.signed(), "m", TRUSTED, job="41", checkpoint=OTHER)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.pop("uid"), "'uid' is missing"),
        (lambda m: m.update(extra=1), "'extra' is unknown"),
        (lambda m: m.update(uid=-1), "uid"),
        (lambda m: m.update(uid=True), "uid"),
        (lambda m: m.update(job="../41"), "not valid"),
        (lambda m: m.update(checkpoint="x"), "not valid"),
        (lambda m: m.update(format=2), "header says format 1"),
        (lambda m: m.update(images=m["images"] * 2), "not in order or share a file"),
        (lambda m: m["images"][0].update(salt="00"), "salt"),
        (lambda m: m["images"][0]["packs"][0].update(name="../etc/passwd"), "not a valid name"),
        (lambda m: m["images"][0]["packs"][0].update(sha256="zz"), "digest"),
        (lambda m: m.update(slots=[1]), "JSON object"),
        (lambda m: m.update(images={}), "JSON array"),
    ],
)
def test_signed_nonsense(good, change, reason):
    """Even a signed manifest of a wrong shape is refused with what is wrong."""
    table = json.loads(canonical_json(good.manifest().as_dict()))
    change(table)
    with pytest.raises(IntegrityError, match=reason):
        decode(sign_body(canonical_json(table)), "m", TRUSTED)


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"\xff", b"[" * 100000])
def test_signed_non_json(body):
    """Signed bytes that are no JSON object are refused."""
    with pytest.raises(IntegrityError):
        decode(sign_body(body), "m", TRUSTED)


@pytest.mark.parametrize("meta", [{"x": object()}, {"x": float("nan")}, {"x": (1, 2)}, {1: 2}])
def test_meta_that_does_not_read_back_is_refused(good, meta):
    """What JSON cannot hold exactly is refused before it is signed."""
    with pytest.raises(UsageError):
        encode(good.manifest(meta=meta), SIGNING)


# --- key slots ------------------------------------------------------------------------------------------


def test_slot_opens_with_its_key_and_checkpoint(good):
    """The data key comes back; slots of other types and keys are passed over."""
    key = DataKey.generate()
    slots = [{"type": "x509"}, key.wrap(SiteKey(b"o" * 32), CHECKPOINT), key.wrap(SITE, CHECKPOINT)]
    assert key._raw == DataKey.unwrap(slots, [SITE], CHECKPOINT)._raw


def test_wrong_site_key_names_both_keys():
    """A node with another site key says which is wanted and which it has."""
    other = SiteKey(b"o" * 32)
    slot = DataKey.generate().wrap(other, CHECKPOINT)
    with pytest.raises(WrongKey) as caught:
        DataKey.unwrap([slot], [SITE], CHECKPOINT)
    assert other.key_id in str(caught.value)
    assert SITE.key_id in str(caught.value)
    with pytest.raises(WrongKey, match="no slot"):
        DataKey.unwrap([], [SITE], CHECKPOINT)


def test_slot_swap_between_checkpoints():
    """A slot of another checkpoint does not open."""
    slot = DataKey.generate().wrap(SITE, OTHER)
    with pytest.raises(IntegrityError, match="key slot"):
        DataKey.unwrap([slot], [SITE], CHECKPOINT)


@pytest.mark.parametrize(
    "change", [{"nonce": "00"}, {"wrapped": "zz"}, {"wrapped": "00" * 48}, {"nonce": 5}, {"wrapped": None}]
)
def test_damaged_slot(change):
    """A damaged slot is refused as such, not as a crash."""
    slot = DataKey.generate().wrap(SITE, CHECKPOINT) | change
    with pytest.raises(IntegrityError, match="key slot"):
        DataKey.unwrap([slot], [SITE], CHECKPOINT)
