"""The signed manifest: without it a checkpoint does not exist.

Who calls: the coordinator (encode, last step before Staging.publish), restore and list (decode).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence

from gpucr_hpc.errors import FormatUnknown, IntegrityError, SignatureError, UsageError
from gpucr_hpc.image.keys import SLOT_TYPE_SITE, PublicKey, SigningKey
from gpucr_hpc.model import READABLE_VERSIONS, Manifest, canonical_json

MANIFEST_MAGIC = b"GPUCRMAN"
#: magic, version, zero, zero, length of the body, public key of the signer
_HEAD = struct.Struct("<8sHHIQ32s")
SIGNATURE_BYTES = 64
#: Magic, version and lengths, signer, signature; the JSON body follows.
MANIFEST_HEADER_BYTES = _HEAD.size + SIGNATURE_BYTES
#: A larger manifest is refused before it is parsed.
MAX_MANIFEST_BYTES = 64 << 20
_CONTEXT = b"gpucr-v1 manifest\0"


def encode(manifest: Manifest, signing_key: SigningKey) -> bytes:
    """Bytes of a manifest in its own format version, signed, and read back before they are returned.

    Raises UsageError (meta is not JSON, or too large).
    """
    if manifest.format not in READABLE_VERSIONS:
        raise UsageError(reason=f"this release does not know format {manifest.format}")
    if manifest.format == 1 and any(slot.get("type") != SLOT_TYPE_SITE for slot in manifest.slots):
        raise UsageError(
            reason=f"checkpoint {manifest.checkpoint} is of format 1, which has no protection against other holders "
            "of its data key: it cannot be opened to anybody but the site"
        )
    table = manifest.as_dict()
    try:
        body = canonical_json(table)
    except (TypeError, ValueError) as error:
        raise UsageError(reason=f"the manifest is not JSON: {error}") from None
    public = signing_key.public
    head = _HEAD.pack(MANIFEST_MAGIC, manifest.format, 0, 0, len(body), public.raw)
    data = head + signing_key.sign(_CONTEXT + head + body) + body
    if len(data) > MAX_MANIFEST_BYTES:
        raise UsageError(reason=f"the manifest has {len(data)} bytes, more than {MAX_MANIFEST_BYTES}")
    if decode(data, "manifest", [public]).as_dict() != table:
        raise UsageError(reason="the manifest does not read back as it was written")
    return data


def decode(
    data: bytes,
    path: str,
    trusted: Sequence[PublicKey],
    *,
    job: str | None = None,
    checkpoint: str | None = None,
) -> Manifest:
    """The manifest, after length, magic, version, total size, signature, and only then its meaning.

    job, checkpoint: where it was found; a good manifest of another place is refused. The caller still checks
    the uid. Raises IntegrityError, FormatUnknown, SignatureError.
    """
    if len(data) < MANIFEST_HEADER_BYTES:
        raise IntegrityError(path=path, reason=f"ends after {len(data)} bytes, inside its header")
    magic, version, zero, zero2, length, signer = _HEAD.unpack_from(data)
    if magic != MANIFEST_MAGIC:
        raise IntegrityError(path=path, reason="does not begin with the magic of a manifest")
    if version not in READABLE_VERSIONS:
        raise FormatUnknown(path=path, found=version, known=" and ".join(map(str, READABLE_VERSIONS)))
    if zero or zero2 or len(data) != MANIFEST_HEADER_BYTES + length or len(data) > MAX_MANIFEST_BYTES:
        expected = MANIFEST_HEADER_BYTES + length
        raise IntegrityError(path=path, reason=f"has {len(data)} bytes, its header says {expected}")
    body = data[MANIFEST_HEADER_BYTES:]
    key = next((key for key in trusted if key.raw == signer), None)
    if key is None:
        raise SignatureError(path=path, reason=f"signed by key {PublicKey(signer).key_id}, which is not trusted")
    signature = data[_HEAD.size : MANIFEST_HEADER_BYTES]
    if not key.verifies(signature, _CONTEXT + data[: _HEAD.size] + body):
        raise SignatureError(path=path, reason="the content does not match the signature")
    try:
        manifest = Manifest.from_dict(json.loads(body))
    except (ValueError, RecursionError) as error:
        raise IntegrityError(path=path, reason=error) from None
    if manifest.format != version:
        raise IntegrityError(path=path, reason=f"header says format {version}, body {manifest.format}")
    if job not in (None, manifest.job) or checkpoint not in (None, manifest.checkpoint):
        found = f"belongs to job {manifest.job}, checkpoint {manifest.checkpoint}"
        raise IntegrityError(path=path, reason=found)
    return manifest
