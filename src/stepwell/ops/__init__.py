"""Operations on a machine and on stored data, beside the running well: doctor, fsck, uninstall."""

from __future__ import annotations
