"""`python -m lab.sim.late`: what each rule of waiting costs on devices that stand still now and then."""

from __future__ import annotations

from lab.sim.late.replay import RULES, Weather, replay

WEATHERS = {
    "100 ms, once in 2 s": Weather(2.0, 0.1, 0.3),
    "100 ms, once in 40 s": Weather(40.0, 0.1, 0.3),
    "110 ms, once a second in a third of the time": Weather(1.0, 0.11, 0.5, share=1 / 3),
    "the same, and one in 20 is a hang": Weather(1.0, 0.11, 0.5, share=1 / 3, per_hang=20),
    "150 ms, some 600 ms, once in 40 s": Weather(40.0, 0.15, 0.7),
    "hangs only, once in 40 s": Weather(40.0, 0.0, 0.0, per_hang=1),
}
"""How long stalls are, and how often they come."""


def main(requests: int = 4000, seeds: int = 5) -> None:
    print(f"{seeds * requests} requests each; hindsight gives up at once what is not worth waiting for")
    for name, weather in WEATHERS.items():
        print(f"\n{name}\n{'':16}{'TTFT':>10}{'given up':>10}{'too soon':>10}{'in vain':>10}{'longest':>10}")
        for label, rule in RULES.items():
            results = [replay(weather, rule, requests, seed) for seed in range(seeds)]
            count = sum(result.requests for result in results)
            each_ms = [
                1e3 * sum(seconds) / count
                for seconds in zip(*((r.ttft_s, r.too_soon_s, r.in_vain_s) for r in results), strict=True)
            ]
            given_up = sum(result.given_up for result in results) / count
            longest_ms = 1e3 * max(result.longest_s for result in results)
            cells = f"{each_ms[0]:7.1f} ms{given_up:10.2%}{each_ms[1]:7.2f} ms{each_ms[2]:7.2f} ms{longest_ms:7.0f} ms"
            print(f"{label:16}{cells}")


if __name__ == "__main__":
    main()
