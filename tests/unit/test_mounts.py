"""Where an unchanged ctime proves unchanged content, by simulated mount tables and by what can be mounted here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from stepwell.io.mounts import STAMPED, Mount, mounts, unstamped
from stepwell.testing.mounts import image, why_no_mounts

NO_IMAGE = why_no_mounts()


def table(tmp_path: Path, *rows: tuple[str, str, str, str]) -> list[Mount]:
    """Of (point below tmp_path, kind, device, options), as the kernel would list them."""
    lines = ["1 0 8:1 / / rw - ext4 /dev/root rw"]
    for number, (point, kind, device, options) in enumerate(rows, 2):
        (tmp_path / point).mkdir(parents=True, exist_ok=True)
        where = str(tmp_path / point).replace(" ", "\\040")
        lines.append(f"{number} 1 {device} / {where} rw,noatime shared:1 - {kind} source {options}")
    listed = tmp_path / "system/proc/self"
    listed.mkdir(parents=True, exist_ok=True)
    (listed / "mountinfo").write_text("\n".join(lines))
    return mounts(tmp_path / "system")


@pytest.mark.parametrize("kind", sorted(STAMPED))
def test_local_filesystems_prove_it(tmp_path: Path, kind: str) -> None:
    assert unstamped(tmp_path / "m/x", table(tmp_path, ("m", kind, "259:3", "rw"))) == ""


@pytest.mark.parametrize(
    "kind",
    ["nfs4", "cifs", "lustre", "ceph", "9p", "virtiofs", "fuse", "fuseblk", "fuse.rclone", "fuse.sshfs", "squashfs",
     "erofs", "iso9660", "udf", "vfat", "exfat", "ramfs", "aufs", "vboxsf", "something new"],
)  # fmt: skip
def test_whatever_else_proves_nothing(tmp_path: Path, kind: str) -> None:
    shown = kind.replace(" ", "_")
    assert unstamped(tmp_path / "m/x", table(tmp_path, ("m", shown, "0:40", "ro"))) == shown


def test_what_is_mounted_from_a_file_proves_nothing(tmp_path: Path) -> None:
    """It may be an image of another version tomorrow, with the same numbers and times."""
    assert unstamped(tmp_path / "m/x", table(tmp_path, ("m", "ext4", "7:0", "ro"))) == "ext4 in a file"


def test_a_system_that_lists_no_mounts_proves_nothing(tmp_path: Path) -> None:
    assert unstamped(tmp_path, mounts(tmp_path / "nowhere")) == "unknown"


def test_a_link_is_judged_by_what_it_leads_to(tmp_path: Path) -> None:
    listed = table(tmp_path, ("share", "nfs4", "0:41", "rw"))
    (tmp_path / "share/blob").touch()
    (tmp_path / "model").symlink_to(tmp_path / "share/blob")
    assert unstamped(tmp_path / "model", listed) == "nfs4"


LAYERS = (("a b", "ext4", "8:2", "rw"), ("b", "xfs", "8:3", "rw"), ("image", "squashfs", "7:1", "ro"))


@pytest.mark.parametrize(
    ("lower", "upper", "why"),
    [
        (["b", "a b"], "b", ""),
        (["a b"], "", ""),
        (["b", "image"], "b", "overlay of squashfs in a file"),
        (["image"], "b", "overlay of squashfs in a file"),
        (["b"], "image", "overlay of squashfs in a file"),
        (["b", "gone"], "b", "overlay of unknown"),
        (["b", "over/below"], "b", "overlay of unknown"),
        ([], "", "overlay of unknown"),
    ],
)
def test_an_overlay_proves_what_all_its_layers_prove(
    tmp_path: Path, lower: Sequence[str], upper: str, why: str
) -> None:
    """Those that are not seen here are another system's, as in a container."""
    (tmp_path / "over/below").mkdir(parents=True)
    folders = ":".join(str(tmp_path / name).replace(" ", "\\040") for name in lower)
    options = ["ro"] + ([f"lowerdir={folders}"] if lower else [])
    options += [f"upperdir={tmp_path / upper}", f"workdir={tmp_path}/work"] if upper else []
    listed = table(tmp_path, *LAYERS, ("over", "overlay", "0:50", ",".join(options)))
    assert unstamped(tmp_path / "over/x", listed) == why


def test_overlays_of_overlays_are_not_followed_for_ever(tmp_path: Path) -> None:
    over = [(f"o{n}", "overlay", f"0:{n}", f"lowerdir={tmp_path}/o{1 - n}") for n in (0, 1)]
    assert unstamped(tmp_path / "o0/x", table(tmp_path, *over)).endswith("overlay of unknown")


MOUNTED = """
import sys
from pathlib import Path
from stepwell.io.mounts import unstamped
for name in ("tmp/x", "ram/x", "good/x", "bad/x"):
    print(name, unstamped(Path(sys.argv[1], name)) or "proves")
"""


def test_filesystems_that_are_really_mounted(tmp_path: Path) -> None:
    for name in ("tmp", "ram", "good", "bad"):
        (tmp_path / name).mkdir()
    script = f"""
        cd {tmp_path} && mount -t tmpfs none tmp && mount -t ramfs none ram &&
        mkdir tmp/low tmp/low2 tmp/up tmp/work tmp/up2 tmp/work2 ram/low &&
        mount -t overlay -o lowerdir=$PWD/tmp/low:$PWD/tmp/low2,upperdir=$PWD/tmp/up,workdir=$PWD/tmp/work none good &&
        mount -t overlay -o lowerdir=$PWD/ram/low,upperdir=$PWD/tmp/up2,workdir=$PWD/tmp/work2 none bad &&
        exec "$@"
    """
    unshare = shutil.which("unshare")
    wrap = [unshare or "unshare", *([] if os.geteuid() == 0 else ["-r"]), "-m", "sh", "-c", script, "sh"]
    if unshare is None or subprocess.run([*wrap, "true"], capture_output=True).returncode != 0:
        pytest.skip("mounts cannot be made here")
    command = [*wrap, sys.executable, "-c", MOUNTED, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == ["tmp/x proves", "ram/x ramfs", "good/x proves", "bad/x overlay of ramfs"]


@pytest.mark.skipif(bool(NO_IMAGE), reason=NO_IMAGE)
def test_a_filesystem_that_is_really_in_a_file() -> None:
    with image("ext4", 16) as made:
        assert unstamped(made.path / "x") == "ext4 in a file"
