"""What Wine 8 lacks of Windows' libraries and Tandem's packages call: written as PE files, without a compiler."""

import struct
from pathlib import Path

_ALIGNMENT = 0x1000
_HEADERS = 0x400
# Machine code for x86-64 of functions that Wine exports but does not implement. A complex number of two floats is in
# rcx, the real part in its lower half; of one of two doubles, rcx is the address.
COMPLEX_PARTS = {
    "crealf": bytes.fromhex("660f6ec1c3"),  # movd xmm0, ecx; ret
    "cimagf": bytes.fromhex("48c1e920660f6ec1c3"),  # shr rcx, 32; movd xmm0, ecx; ret
    "creal": bytes.fromhex("f20f1001c3"),  # movsd xmm0, [rcx]; ret
    "cimag": bytes.fromhex("f20f104108c3"),  # movsd xmm0, [rcx + 8]; ret
}


def forwarding_library(name: str, exports: dict[str, str]) -> bytes:
    """Return a DLL for x86-64 whose only content is exports that are forwarded: {"ProcessPrng": "advapi32.Name"}."""
    names = sorted(exports)
    functions = 40  # the export directory's size; the three tables and the strings follow it
    strings = functions + len(names) * (4 + 4 + 2)
    text, places = bytearray(), {}
    for part in [name, *names, *exports.values()]:
        places[part] = _ALIGNMENT + strings + len(text)
        text += part.encode("ascii") + b"\0"
    tables = [_ALIGNMENT + functions + len(names) * size for size in (0, 4, 8)]
    section = struct.pack("<IIHHIIIIIII", 0, 0, 0, 0, places[name], 1, len(names), len(names), *tables)
    section += struct.pack(f"<{len(names)}I", *(places[exports[export]] for export in names))
    section += struct.pack(f"<{len(names)}I", *(places[export] for export in names))
    section += struct.pack(f"<{len(names)}H", *range(len(names))) + bytes(text)
    size = len(section)
    padded = section.ljust(-(-size // 0x200) * 0x200, b"\0")
    dos = b"MZ".ljust(0x3C, b"\0") + struct.pack("<I", 0x40)
    coff = struct.pack("<IHHIIIHH", 0x4550, 0x8664, 1, 0, 0, 0, 240, 0x2022)  # a DLL of 64 bits
    optional = struct.pack("<HBBIIIII", 0x20B, 14, 0, 0, len(padded), 0, 0, _ALIGNMENT)
    optional += struct.pack("<QIIHHHHHHIIIIHH", 0x180000000, _ALIGNMENT, 0x200, *(6, 0, 0, 0, 6, 0), 0,
                            2 * _ALIGNMENT, _HEADERS, 0, 3, 0x100)  # fmt: skip
    optional += struct.pack("<QQQQII", 0x100000, 0x1000, 0x100000, 0x1000, 0, 16)
    optional += struct.pack("<II", _ALIGNMENT, size) + bytes(15 * 8)
    header = struct.pack("<8sIIIIIIHHI", b".edata", size, _ALIGNMENT, len(padded), _HEADERS, 0, 0, 0, 0, 0x40000040)
    return (dos + coff + optional + header).ljust(_HEADERS, b"\0") + padded


class Library:
    """A DLL for x86-64, in memory."""

    def __init__(self, path: Path) -> None:
        self.data = bytearray(path.read_bytes())
        start = int.from_bytes(self.data[0x3C:0x40], "little")
        count, size = struct.unpack_from("<H12xH", self.data, start + 6)
        first = start + 24 + size
        self._sections = [struct.unpack_from("<8xIIII", self.data, first + 40 * index) for index in range(count)]
        (directory,) = struct.unpack_from("<I", self.data, start + 24 + 112)
        names, functions, name_table, ordinals = struct.unpack_from("<IIII", self.data, self._offset(directory) + 24)
        self.exports = {
            self._text(self._long(name_table + 4 * index)): self._long(
                functions + 4 * self._short(ordinals + 2 * index)
            )
            for index in range(names)
        }

    def _offset(self, address: int) -> int:
        for size, start, _, place in self._sections:
            if start <= address < start + size:
                return place + address - start
        raise ValueError(f"no section has the address {address:#x}")

    def _long(self, address: int) -> int:
        return int(struct.unpack_from("<I", self.data, self._offset(address))[0])

    def _short(self, address: int) -> int:
        return int(struct.unpack_from("<H", self.data, self._offset(address))[0])

    def _text(self, address: int) -> str:
        start = self._offset(address)
        return self.data[start : self.data.index(0, start)].decode("ascii")

    def replace(self, export: str, code: bytes) -> None:
        """Overwrite the beginning of an exported function with machine code."""
        start = self._offset(self.exports[export])
        self.data[start : start + len(code)] = code
