"""Run every attack and print a table; exit code 1 when a bound does not hold."""

from __future__ import annotations

import sys

from tests.security.attacks import ATTACKS, attempt


def main() -> int:
    """Print a row per attack."""
    failed = 0
    print(f"{'attack':30} {'bound':37} {'seconds':>7}  result")
    for attack in ATTACKS:
        try:
            result, seconds = attempt(attack)
        except Exception as error:  # any error means that the bound did not hold
            failed += 1
            result, seconds = f"NOT HELD: {error}", float("nan")
        print(f"{attack.name:30} {attack.bound:37} {seconds:7.1f}  {result}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
