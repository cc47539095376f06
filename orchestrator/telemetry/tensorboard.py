"""TensorBoard event files of scalars, written without TensorFlow, torch or protobuf.

    file     records of: length (uint64), crc(length), Event, crc(Event)       tensorflow/core/lib/io/record_writer.cc
    crc      crc32c, rotated right by 15, plus 0xa282ead8                       tensorflow/core/lib/hash/crc32c.h
    Event    1 wall_time double, 2 step int64, 3 file_version, 5 summary, 7 session_log   tensorflow/.../event.proto
    Summary  1 value: 1 tag, 2 simple_value float                                         tensorflow/.../summary.proto

The libraries that do the same write later, in a thread, and bring torch or 77 MB: docs/decisions/0015-libraries.md.
"""

import struct
import time
from pathlib import Path

from orchestrator.base.errors import RunError
from orchestrator.base.files import writing
from orchestrator.telemetry.sinks import Committed, Metrics

SESSION_START = b"\x08\x01"
"""SessionLog {1 status: START}: readers drop what earlier files have from this event's step on."""


class TensorBoard:
    """Event files in `directory`, one per execution.

    What earlier executions wrote from the last committed step on is purged, and that step is written again: it is the
    only one that a killed execution can have committed and not written.
    """

    def __init__(self, directory: Path, committed: Committed) -> None:
        now_s = time.time()
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
            number = len(list(directory.iterdir()))
            self._path = directory / f"events.out.tfevents.{int(now_s):010d}.{number:04d}"
            self._file = self._path.open("xb", buffering=0)
        self._write(_double(1, now_s) + _bytes(3, b"brain.Event:2"))
        for step, metrics in committed[-1:]:
            self._write(_double(1, now_s) + _varint(2, step) + _bytes(7, SESSION_START))
            self.write(step, metrics)

    def write(self, step: int, metrics: Metrics) -> None:
        values = [_bytes(1, name.encode()) + _float(2, value) for name, value in sorted(metrics.items())]
        summary = b"".join(_bytes(1, value) for value in values)
        self._write(_double(1, time.time()) + _varint(2, step) + _bytes(5, summary))

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        record = length + _masked_crc(length) + event + _masked_crc(event)
        with writing(self._path):
            written = self._file.write(record)
        if written is not None and written < len(record):
            raise RunError(f"{self._path}: cannot be written: the disk is full")

    def close(self, *, failed: bool) -> None:
        self._file.close()


def _tag(number: int, wire_type: int) -> bytes:
    return bytes([number << 3 | wire_type])


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _varint(number: int, value: int) -> bytes:
    return _tag(number, 0) + _number(value)


def _double(number: int, value: float) -> bytes:
    return _tag(number, 1) + struct.pack("<d", value)


def _bytes(number: int, value: bytes) -> bytes:
    return _tag(number, 2) + _number(len(value)) + value


def _float(number: int, value: float) -> bytes:
    return _tag(number, 5) + struct.pack("<f", value)


def _crc_table() -> tuple[int, ...]:
    """Remainders of all bytes by the Castagnoli polynomial, reflected."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_TABLE = _crc_table()


def _masked_crc(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
