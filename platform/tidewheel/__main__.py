"""`python -m tidewheel` is the `tidewheel` command, for launchers that start modules, such as torchrun."""

from tidewheel.cli import main

if __name__ == "__main__":
    main()
