"""A rank that waits for ever, as one does in a collective whose peer is gone."""

import time


def stuck_on_purpose() -> None:
    time.sleep(600)


def main() -> None:
    stuck_on_purpose()


if __name__ == "__main__":
    main()
