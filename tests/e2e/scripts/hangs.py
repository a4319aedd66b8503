"""A rank that waits for ever, as one does in a collective whose peer is gone."""

import sys
import time


def stuck_on_purpose() -> None:
    time.sleep(600)


def main() -> None:
    if "--with-agent" in sys.argv:
        import tula_agent

        tula_agent.init()
    stuck_on_purpose()


if __name__ == "__main__":
    main()
