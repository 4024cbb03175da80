"""``python -m zf_profile`` is ``zf-profile``."""

import sys

from zf_profile.cli import main

if __name__ == "__main__":  # not in the processes that `compile` starts
    sys.exit(main())
