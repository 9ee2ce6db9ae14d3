"""Random models: ``python tests/fuzz/fuzz.py --models 1000 --seed 0 --ranks 2 --form fx``, a report a fault.

Ends with the number of models that trained as one process does, and exit status 1 if any did not.
"""

import sys

from fuzz_runner import main

if __name__ == "__main__":
    sys.exit(main())
