"""`python -m dovetail.processes ENTRY BOOT`: a child process.

ENTRY is the name of the entry point, shown in process lists. BOOT is the descriptor of the memory
with the boot record.
"""

import sys

from dovetail.processes.child_main import main

if __name__ == "__main__":
    sys.exit(main(int(sys.argv[2])))
