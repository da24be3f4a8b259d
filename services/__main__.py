"""`python -m services <command>`: the command line of `lagrange`, for a process started by its interpreter."""

from services.cli import main

if __name__ == "__main__":
    main()
