"""How much a step may copy out of the engine's pages."""

from __future__ import annotations

MIN_BYTES = 64 << 20
"""A step may copy so much, however little was computed: some 10 ms on a CPU, 3 ms beside a forward on a GPU."""


class SaveRoom:
    """A step may copy as many bytes of KV as were computed by the steps that have been confirmed since the last plan
    but one (slots may be granted a step late, and blocks end where steps do not), and `MIN_BYTES` in any case. So
    what is yet to be copied does not pile up, whatever the model and the size of its steps: a model of 8 B parameters
    computes 1 GiB in a step of 8,192 tokens. What is copied in urgency, before pages are taken, counts too: what is
    beyond it then is given up.

    That is a small share of the time that computing took, wherever it is spent (estimates for that model). On a CPU the
    next step copies, 13 to 26 us a token, which took it some 10 ms to compute. On a GPU the copy runs beside the next
    forward: 25 ms for 1 GiB, which took 250 ms to compute.
    """

    def __init__(self, token_bytes: float) -> None:
        """`token_bytes`: of a token's KV, of one rank."""
        self._token_bytes = token_bytes
        self._earlier = self._computed = self._spent = 0.0

    def computed(self, tokens: int) -> None:
        """A step that computed them is confirmed."""
        self._computed += tokens * self._token_bytes

    @property
    def left(self) -> float:
        return max(MIN_BYTES, self._earlier + self._computed) - self._spent

    def spend(self, nbytes: int) -> None:
        self._spent += nbytes

    def next_step(self) -> None:
        self._earlier, self._computed, self._spent = self._computed, 0.0, 0.0
