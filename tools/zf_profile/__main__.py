"""``python -m zf_profile`` is ``zf-profile``."""

import sys

from zf_profile.cli import main

sys.exit(main())
