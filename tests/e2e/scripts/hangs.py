"""Waits forever, like a rank in a collective whose peer has gone."""

import time


def stuck_on_purpose() -> None:
    time.sleep(600)


def main() -> None:
    stuck_on_purpose()


if __name__ == "__main__":
    main()
