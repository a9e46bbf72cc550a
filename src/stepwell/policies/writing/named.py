"""The write policies by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stepwell.policies.writing.back import Back
from stepwell.policies.writing.base import WritePolicy
from stepwell.policies.writing.second_touch import SecondTouchWriting
from stepwell.policies.writing.through import Through

WRITE_POLICIES: Mapping[str, Callable[[], WritePolicy]] = {
    "through": Through,
    "back": Back,
    "second_touch": SecondTouchWriting,
}
