"""Run the tests marked gpu; further arguments are pytest's."""

import subprocess
import sys

from tests.gpu import command

sys.exit(subprocess.call([sys.executable, *command(), *sys.argv[1:]]))
