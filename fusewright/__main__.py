"""`python -m fusewright` is the command `fusewright`."""

from fusewright.cli import main

main()
