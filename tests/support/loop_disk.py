"""A file system of its own on a loop device: its power can be cut, and it can be full."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_SHUTDOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN: from then on the file system writes nothing, as if the power were gone."""
_WITHOUT_LOG_FLUSH = struct.pack("I", 2)
# Long enough that nothing gets to the disk by itself while a test writes.
_OPTIONS = "loop,commit=300"


@dataclass
class Disk:
    """A mounted image of ext4."""

    folder: Path
    _image: Path

    def mount(self) -> None:
        subprocess.run(["mount", "-o", _OPTIONS, str(self._image), str(self.folder)], check=True)

    def unmount(self) -> None:
        subprocess.run(["umount", str(self.folder)], check=True)

    def cut_power(self) -> None:
        """Cut the power at once, even during writes; all later writes fail."""
        place = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(place, _SHUTDOWN, _WITHOUT_LOG_FLUSH)
        finally:
            os.close(place)

    def fill(self, leaving: int = 0) -> None:
        """Fill the disk until only `leaving` bytes are free."""
        for piece in (64 << 10, 1 << 10, 1):
            with contextlib.suppress(OSError), (self.folder / "filler").open("ab", buffering=0) as filler:
                while filler.write(bytes(piece)):
                    os.fsync(filler)
        if leaving:
            os.truncate(self.folder / "filler", (self.folder / "filler").stat().st_size - leaving)

    def free(self) -> None:
        (self.folder / "filler").unlink()

    def power_on(self) -> None:
        """Mount the disk's content again. No process may have a file of it open."""
        self.unmount()
        self.mount()


@contextlib.contextmanager
def disk(folder: Path, size: int = 256 << 20) -> Iterator[Disk]:
    """Yield a new disk, mounted below `folder`. Skips the test where no image can be mounted."""
    if os.geteuid() != 0 or not Path("/dev/loop-control").exists() or shutil.which("mkfs.ext4") is None:
        pytest.skip("only root can mount an image of a file system, with loop devices and mkfs.ext4")
    image, place = folder / "disk.img", folder / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(size)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    made = Disk(place, image)
    try:
        made.mount()
    except subprocess.CalledProcessError:
        pytest.skip("the image of a file system cannot be mounted here")
    try:
        yield made
    finally:
        # Detach it even while a file is open: an exception that was kept may hold one.
        subprocess.run(["umount", "-l", str(place)], check=True)
        image.unlink()
