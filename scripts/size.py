"""Lines of code, shown rather than forced: per package, the longest files, the core below `engines`."""

from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "stepwell"
PROGRAMS = {"bench", "cli", "demo", "ops", "plan", "serve", "simulate", "testing", "trust", "__main__"}
ABOVE_CORE = PROGRAMS | {"engines", "longctx"}
CORE_AIM = 6000  # lines, readable in an hour or two


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def main() -> None:
    sizes = {path.relative_to(SOURCE): lines(path) for path in sorted(SOURCE.rglob("*.py"))}
    packages: Counter[str] = Counter()
    for path, count in sizes.items():
        packages[path.parts[0].removesuffix(".py")] += count
    for name, count in packages.most_common():
        print(f"{count:7,}  {name}")
    core = sum(count for name, count in packages.items() if name not in ABOVE_CORE)
    written = sorted(count for count in sizes.values() if count)
    print(f"{sum(sizes.values()):7,}  in all, {core:,} of them below engines (aim {CORE_AIM:,})")
    longest = sorted(sizes.items(), key=lambda item: -item[1])[:5]
    print(
        f"median file {written[len(written) // 2]}; longest: " + ", ".join(f"{path} {count}" for path, count in longest)
    )


if __name__ == "__main__":
    main()
