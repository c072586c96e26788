"""What writes an image and what reads it."""

from __future__ import annotations

from gpucr_hpc.image.keys import DataKey
from gpucr_hpc.image.reader import ImageReader
from gpucr_hpc.image.writer import ImageWriter

ID = "20261127T232501Z-3f9a"
KEY = DataKey(b"k" * 32, b"i" * 32)


def writer(staging, **values) -> ImageWriter:
    return ImageWriter(staging.create, **{"checkpoint": ID, "node_rank": 0, "key": KEY, **values})


def reader(opened, entry) -> ImageReader:
    return ImageReader(opened, entry, checkpoint=ID, key=KEY)
