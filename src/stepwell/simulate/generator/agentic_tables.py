"""Quantiles of recorded coding conversations, for `agentic`.

Fitted to 346 Claude Code conversations: every second of those in github.com/callanjfox/kv-cache-tester (Apache-2.0),
without duplicates and without the 29 largest files, so that long ones are too few. Tokens and seconds. They are
parameters: nothing of a conversation is in them.
"""

from __future__ import annotations

from typing import NamedTuple

POINTS = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)
NEW_TOKENS = (31, 144, 191, 233, 375, 716, 1655, 3677, 6278, 16831, 74460, 222716)
# More points: between few of them the long gaps, which are what tiers live on, come out a quarter too long on average.
GAP_POINTS = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.975, 0.99, 0.995, 0.998, 0.999, 0.9995, 1.0)
GAP = (0, 4, 7, 8, 11, 18, 37, 129, 306, 637, 1923, 3081, 6863, 15283, 39148, 77611)
OUTPUT = (0, 59, 92, 107, 141, 223, 436, 889, 1534, 3673, 7659, 18195)
KEPT_ON_RESET = (0, 0, 0, 8384, 11712, 14784, 15680, 23072, 33792, 53504, 96355, 104320)
AFTER_COMPACTION = (8868, 9011, 9724, 10174, 15540, 32403, 52735, 94397, 105999, 154547, 241395, 254818)


class Band(NamedTuple):
    """Conversations whose first prompt lies in one range; bands differ in the number of requests that follow."""

    share: float
    first_context: tuple[int, ...]
    requests: tuple[int, ...]


BAND_POINTS = (0, 0.05, 0.25, 0.5, 0.75, 0.95, 1)
BANDS = (
    Band(0.523, (8979, 11821, 16946, 18945, 20725, 25439, 29914), (3, 7, 26, 68, 119, 237, 561)),
    Band(0.225, (30865, 33044, 53996, 68251, 87721, 104294, 109555), (4, 4, 15, 38, 74, 197, 242)),
    Band(0.118, (112994, 114481, 125560, 134340, 150595, 186796, 198885), (3, 4, 5, 12, 35, 59, 152)),
    Band(0.133, (200417, 216057, 259575, 294051, 422493, 765990, 851858), (3, 4, 6, 18, 32, 100, 118)),
)

# Tuned so that lengths of contexts agree with the recordings; not observed shares.
P_COMPACTION = 0.002
P_INVALIDATION = 0.0108
CAP = (200_000, 300_000)
CAP_OF_LAST_BAND = 900_000
